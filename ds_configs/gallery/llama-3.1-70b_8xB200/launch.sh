#!/usr/bin/env bash
# meta-llama/Llama-3.1-70B on 8xB200: zero3, micro-batch 1 x 1, 162.2 of 191.5 GB
# ZeRO-3 is the simplest of the layouts that fit and communicate least: it needs 162.2 GB (149.1 to 179.9) of 191.5 GB, at most in the loss phase: optimizer states 70.6, master weights 35.3, weights 17.6, gradients 17.6; micro-batch 1 with gradient checkpointing.
# Run: accelerate launch --config_file ./accelerate.yaml -m shardwright.trainers.train_causal_lm --model meta-llama/Llama-3.1-70B --training-arguments ./training_arguments.json --seq-len 4096 --output-dir ./model --plan .
# Assumes bf16, adamw_torch_fused, method full, sequences of 4096 tokens without padding, 191.5 GB usable on each accelerator.
# Assumes a common server where you stated nothing: host_bytes_per_node = 2.199e+12.
set -euo pipefail
directory="$(cd "$(dirname "$0")" && pwd)"
exec accelerate launch --config_file "$directory"/accelerate.yaml -m shardwright.trainers.train_causal_lm --model meta-llama/Llama-3.1-70B --training-arguments "$directory"/training_arguments.json --seq-len 4096 --output-dir "$directory"/model --plan "$directory" "$@"
