#!/usr/bin/env bash
# meta-llama/Llama-3.1-8B on 1xRTX4090: single, micro-batch 1 x 1, 15.0 of 25.4 GB
# One process is enough for one accelerator: it needs 15.0 GB (13.6 to 16.9) of 25.4 GB, at most in the loss phase: loss 6.3, weights 5.9, activations 1.2, runtime context 0.600; micro-batch 1 with gradient checkpointing.
# Run: accelerate launch --config_file ./accelerate.yaml -m shardwright.trainers.train_causal_lm --model meta-llama/Llama-3.1-8B --training-arguments ./training_arguments.json --seq-len 4096 --output-dir ./model --plan . --method qlora --lora-rank 16 --lora-targets all-linear
# Assumes bf16, adamw_torch_fused, method qlora, sequences of 4096 tokens without padding, 25.4 GB usable on each accelerator.
# Assumes a common server where you stated nothing: host_bytes_per_node = 6.872e+10.
set -euo pipefail
directory="$(cd "$(dirname "$0")" && pwd)"
exec accelerate launch --config_file "$directory"/accelerate.yaml -m shardwright.trainers.train_causal_lm --model meta-llama/Llama-3.1-8B --training-arguments "$directory"/training_arguments.json --seq-len 4096 --output-dir "$directory"/model --plan "$directory" --method qlora --lora-rank 16 --lora-targets all-linear "$@"
