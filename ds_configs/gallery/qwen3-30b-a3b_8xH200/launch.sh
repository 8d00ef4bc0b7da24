#!/usr/bin/env bash
# Qwen/Qwen3-30B-A3B on 8xH200: zero3, micro-batch 1 x 1, 114.7 of 150.0 GB
# ZeRO-3 is the simplest of the layouts that fit and communicate least: it needs 114.7 GB (105.3 to 127.4) of 150.0 GB, at most in the loss phase: activations 38.3, optimizer states 30.5, master weights 15.3, weights 7.6; micro-batch 1 without gradient checkpointing.
# Run: accelerate launch --config_file ./accelerate.yaml -m shardwright.trainers.train_causal_lm --model Qwen/Qwen3-30B-A3B --training-arguments ./training_arguments.json --seq-len 4096 --output-dir ./model --plan .
# Assumes bf16, adamw_torch_fused, method full, sequences of 4096 tokens without padding, 150.0 GB usable on each accelerator.
# Assumes a common server where you stated nothing: host_bytes_per_node = 2.199e+12.
set -euo pipefail
directory="$(cd "$(dirname "$0")" && pwd)"
exec accelerate launch --config_file "$directory"/accelerate.yaml -m shardwright.trainers.train_causal_lm --model Qwen/Qwen3-30B-A3B --training-arguments "$directory"/training_arguments.json --seq-len 4096 --output-dir "$directory"/model --plan "$directory" "$@"
