#!/usr/bin/env bash
# meta-llama/Llama-3.1-8B on 8xH100-80GB: fsdp2, micro-batch 1 x 1, 48.6 of 84.9 GB
# FSDP2 is the strategy you asked for: it needs 48.6 GB (44.4 to 54.3) of 84.9 GB, at most in the loss phase: activations 26.5, optimizer states 8.0, loss 5.3, weights 4.0; micro-batch 1 without gradient checkpointing.
# Run: accelerate launch --config_file ./accelerate.yaml -m shardwright.trainers.train_causal_lm --model meta-llama/Llama-3.1-8B --training-arguments ./training_arguments.json --seq-len 4096 --output-dir ./model --plan .
# Assumes bf16, adamw_torch_fused, method full, sequences of 4096 tokens without padding, 84.9 GB usable on each accelerator.
# Assumes a common server where you stated nothing: host_bytes_per_node = 2.199e+12.
set -euo pipefail
directory="$(cd "$(dirname "$0")" && pwd)"
exec accelerate launch --config_file "$directory"/accelerate.yaml -m shardwright.trainers.train_causal_lm --model meta-llama/Llama-3.1-8B --training-arguments "$directory"/training_arguments.json --seq-len 4096 --output-dir "$directory"/model --plan "$directory" "$@"
