#!/usr/bin/env bash
# Qwen/Qwen3-8B on 8xMI300X: ddp, micro-batch 2 x 1, 173.6 of 205.6 GB
# DDP is the simplest layout, and none communicates less: it needs 173.6 GB (159.6 to 192.5) of 205.6 GB, at most in the loss phase: optimizer states 65.5, weights 32.8, gradient buckets 32.8, autocast weight copies 15.1; micro-batch 2 with gradient checkpointing.
# Run: accelerate launch --config_file ./accelerate.yaml -m shardwright.trainers.train_causal_lm --model Qwen/Qwen3-8B --training-arguments ./training_arguments.json --seq-len 4096 --output-dir ./model --plan .
# Assumes bf16, adamw_torch_fused, method full, sequences of 4096 tokens without padding, 205.6 GB usable on each accelerator.
# Assumes a common server where you stated nothing: host_bytes_per_node = 2.199e+12.
set -euo pipefail
directory="$(cd "$(dirname "$0")" && pwd)"
exec accelerate launch --config_file "$directory"/accelerate.yaml -m shardwright.trainers.train_causal_lm --model Qwen/Qwen3-8B --training-arguments "$directory"/training_arguments.json --seq-len 4096 --output-dir "$directory"/model --plan "$directory" "$@"
