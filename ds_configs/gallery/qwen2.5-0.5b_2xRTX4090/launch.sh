#!/usr/bin/env bash
# Qwen/Qwen2.5-0.5B on 2xRTX4090: ddp, micro-batch 1 x 1, 18.4 of 25.4 GB
# DDP is the simplest layout, and none communicates less: it needs 18.4 GB (16.5 to 20.9) of 25.4 GB, at most in the loss phase: loss 7.5, optimizer states 4.0, weights 2.0, gradient buckets 2.0; micro-batch 1 with gradient checkpointing.
# Run: accelerate launch --config_file ./accelerate.yaml -m shardwright.trainers.train_causal_lm --model Qwen/Qwen2.5-0.5B --training-arguments ./training_arguments.json --seq-len 4096 --output-dir ./model --plan .
# Assumes bf16, adamw_torch_fused, method full, sequences of 4096 tokens without padding, 25.4 GB usable on each accelerator.
# Assumes a common server where you stated nothing: host_bytes_per_node = 1.374e+11.
set -euo pipefail
directory="$(cd "$(dirname "$0")" && pwd)"
exec accelerate launch --config_file "$directory"/accelerate.yaml -m shardwright.trainers.train_causal_lm --model Qwen/Qwen2.5-0.5B --training-arguments "$directory"/training_arguments.json --seq-len 4096 --output-dir "$directory"/model --plan "$directory" "$@"
