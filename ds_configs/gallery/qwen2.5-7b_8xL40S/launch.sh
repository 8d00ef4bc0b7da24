#!/usr/bin/env bash
# Qwen/Qwen2.5-7B on 8xL40S: zero2, micro-batch 1 x 1, 37.4 of 47.7 GB
# ZeRO-2 is the simplest of the layouts that fit and communicate least: it needs 37.4 GB (34.1 to 41.9) of 47.7 GB, at most in the loss phase: weights 15.2, optimizer states 7.6, loss 7.5, master weights 3.8; micro-batch 1 with gradient checkpointing.
# Run: accelerate launch --config_file ./accelerate.yaml -m shardwright.trainers.train_causal_lm --model Qwen/Qwen2.5-7B --training-arguments ./training_arguments.json --seq-len 4096 --output-dir ./model --plan .
# Assumes bf16, adamw_torch_fused, method full, sequences of 4096 tokens without padding, 47.7 GB usable on each accelerator.
# Assumes a common server where you stated nothing: host_bytes_per_node = 8.246e+11.
set -euo pipefail
directory="$(cd "$(dirname "$0")" && pwd)"
exec accelerate launch --config_file "$directory"/accelerate.yaml -m shardwright.trainers.train_causal_lm --model Qwen/Qwen2.5-7B --training-arguments "$directory"/training_arguments.json --seq-len 4096 --output-dir "$directory"/model --plan "$directory" "$@"
