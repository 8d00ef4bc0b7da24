#!/usr/bin/env bash
# mistralai/Mistral-7B-v0.3 on 8xA100-40GB: zero2, micro-batch 2 x 1, 35.0 of 42.3 GB
# ZeRO-2 is the simplest of the layouts that fit and communicate least: it needs 35.0 GB (31.9 to 39.3) of 42.3 GB, at most in the step phase: weights 14.5, optimizer states 7.2, master weights 3.6, fp32 gradients 3.6; micro-batch 2 with gradient checkpointing.
# Run: accelerate launch --config_file ./accelerate.yaml -m shardwright.trainers.train_causal_lm --model mistralai/Mistral-7B-v0.3 --training-arguments ./training_arguments.json --seq-len 4096 --output-dir ./model --plan .
# Assumes bf16, adamw_torch_fused, method full, sequences of 4096 tokens without padding, 42.3 GB usable on each accelerator.
# Assumes a common server where you stated nothing: host_bytes_per_node = 1.1e+12.
set -euo pipefail
directory="$(cd "$(dirname "$0")" && pwd)"
exec accelerate launch --config_file "$directory"/accelerate.yaml -m shardwright.trainers.train_causal_lm --model mistralai/Mistral-7B-v0.3 --training-arguments "$directory"/training_arguments.json --seq-len 4096 --output-dir "$directory"/model --plan "$directory" "$@"
