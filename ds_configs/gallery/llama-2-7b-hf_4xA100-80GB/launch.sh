#!/usr/bin/env bash
# meta-llama/Llama-2-7b-hf on 4xA100-80GB: zero1, micro-batch 1 x 1, 65.7 of 85.0 GB
# ZeRO-1 is the simplest of the layouts that fit and communicate least: it needs 65.7 GB (60.2 to 73.3) of 85.0 GB, at most in the backward phase: activations 24.6, weights 13.5, optimizer states 13.5, master weights 6.7; micro-batch 1 without gradient checkpointing.
# Run: accelerate launch --config_file ./accelerate.yaml -m shardwright.trainers.train_causal_lm --model meta-llama/Llama-2-7b-hf --training-arguments ./training_arguments.json --seq-len 4096 --output-dir ./model --plan .
# Assumes bf16, adamw_torch_fused, method full, sequences of 4096 tokens without padding, 85.0 GB usable on each accelerator.
# Assumes a common server where you stated nothing: host_bytes_per_node = 6.185e+11.
set -euo pipefail
directory="$(cd "$(dirname "$0")" && pwd)"
exec accelerate launch --config_file "$directory"/accelerate.yaml -m shardwright.trainers.train_causal_lm --model meta-llama/Llama-2-7b-hf --training-arguments "$directory"/training_arguments.json --seq-len 4096 --output-dir "$directory"/model --plan "$directory" "$@"
