#!/usr/bin/env bash
# meta-llama/Llama-3.1-8B on 8xA100-80GB: zero1, micro-batch 1 x 1, 64.2 of 85.0 GB
# ZeRO-1 is the simplest of the layouts that fit and communicate least: it needs 64.2 GB (58.7 to 71.6) of 85.0 GB, at most in the loss phase: activations 26.5, weights 16.1, optimizer states 8.0, loss 6.3; micro-batch 1 without gradient checkpointing.
# Run: accelerate launch --config_file ./accelerate.yaml -m shardwright.trainers.train_causal_lm --model meta-llama/Llama-3.1-8B --training-arguments ./training_arguments.json --seq-len 4096 --output-dir ./model --plan .
# Assumes bf16, adamw_torch_fused, method full, sequences of 4096 tokens without padding, 85.0 GB usable on each accelerator.
# Assumes a common server where you stated nothing: host_bytes_per_node = 1.237e+12.
set -euo pipefail
directory="$(cd "$(dirname "$0")" && pwd)"
exec accelerate launch --config_file "$directory"/accelerate.yaml -m shardwright.trainers.train_causal_lm --model meta-llama/Llama-3.1-8B --training-arguments "$directory"/training_arguments.json --seq-len 4096 --output-dir "$directory"/model --plan "$directory" "$@"
