#!/usr/bin/env bash
# Qwen/Qwen3-8B on 8xMI300X: ddp, micro-batch 4 x 1, 194.5 of 205.6 GB
# DDP is the simplest layout, and none communicates less: it needs 194.5 GB (188.2 to 205.4) of 205.6 GB, at most in the loss phase: optimizer states 65.5, weights 32.8, gradient buckets 32.8, loss 29.7; micro-batch 4 with gradient checkpointing.
# Run: accelerate launch --config_file ./accelerate.yaml -m shardwright.trainers.train_causal_lm --model Qwen/Qwen3-8B --training-arguments ./training_arguments.json --seq-len 4096 --output-dir ./model
# Assumes bf16, adamw_torch_fused, method full, sequences of 4096 tokens without padding, 205.6 GB usable on each accelerator.
# Assumes a common server where you stated nothing: host_bytes_per_node = 2.199e+12.
set -euo pipefail
directory="$(cd "$(dirname "$0")" && pwd)"
exec accelerate launch --config_file "$directory"/accelerate.yaml -m shardwright.trainers.train_causal_lm --model Qwen/Qwen3-8B --training-arguments "$directory"/training_arguments.json --seq-len 4096 --output-dir "$directory"/model "$@"
