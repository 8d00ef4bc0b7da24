#!/usr/bin/env bash
# meta-llama/Llama-3.2-1B on 1xA100-80GB: single, micro-batch 2 x 1, 49.4 of 85.0 GB
# One process is enough for one accelerator: it needs 49.4 GB (45.3 to 54.9) of 85.0 GB, at most in the loss phase: activations 17.1, loss 12.6, optimizer states 9.9, weights 4.9; micro-batch 2 without gradient checkpointing.
# Run: accelerate launch --config_file ./accelerate.yaml -m shardwright.trainers.train_causal_lm --model meta-llama/Llama-3.2-1B --training-arguments ./training_arguments.json --seq-len 4096 --output-dir ./model --plan .
# Assumes bf16, adamw_torch_fused, method full, sequences of 4096 tokens without padding, 85.0 GB usable on each accelerator.
# Assumes a common server where you stated nothing: host_bytes_per_node = 1.546e+11.
set -euo pipefail
directory="$(cd "$(dirname "$0")" && pwd)"
exec accelerate launch --config_file "$directory"/accelerate.yaml -m shardwright.trainers.train_causal_lm --model meta-llama/Llama-3.2-1B --training-arguments "$directory"/training_arguments.json --seq-len 4096 --output-dir "$directory"/model --plan "$directory" "$@"
