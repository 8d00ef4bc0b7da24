#!/usr/bin/env bash
# meta-llama/Llama-3.2-1B on 8xA100-40GB: ddp, micro-batch 1 x 1, 31.3 of 42.3 GB
# DDP is the simplest layout, and none communicates less: it needs 31.3 GB (28.4 to 35.2) of 42.3 GB, at most in the loss phase: optimizer states 9.9, loss 6.3, weights 4.9, gradient buckets 4.9; micro-batch 1 with gradient checkpointing.
# Run: accelerate launch --config_file ./accelerate.yaml -m shardwright.trainers.train_causal_lm --model meta-llama/Llama-3.2-1B --training-arguments ./training_arguments.json --seq-len 4096 --output-dir ./model --plan .
# Assumes bf16, adamw_torch_fused, method full, sequences of 4096 tokens without padding, 42.3 GB usable on each accelerator.
# Assumes a common server where you stated nothing: host_bytes_per_node = 1.1e+12.
set -euo pipefail
directory="$(cd "$(dirname "$0")" && pwd)"
exec accelerate launch --config_file "$directory"/accelerate.yaml -m shardwright.trainers.train_causal_lm --model meta-llama/Llama-3.2-1B --training-arguments "$directory"/training_arguments.json --seq-len 4096 --output-dir "$directory"/model --plan "$directory" "$@"
