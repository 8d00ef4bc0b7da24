#!/usr/bin/env bash
# meta-llama/Llama-2-7b-hf on 8xV100-32GB: ddp, micro-batch 4 x 1, 27.0 of 34.1 GB
# DDP is the simplest layout, and none communicates less: it needs 27.0 GB (24.5 to 30.5) of 34.1 GB, at most in the loss phase: weights 13.6, loss 6.2, activations 4.7, allocator fragmentation 0.952; micro-batch 4 with gradient checkpointing.
# Run: accelerate launch --config_file ./accelerate.yaml -m shardwright.trainers.train_causal_lm --model meta-llama/Llama-2-7b-hf --training-arguments ./training_arguments.json --seq-len 4096 --output-dir ./model --plan . --method lora --lora-rank 16 --lora-targets all-linear
# Assumes fp16, adamw_torch_fused, method lora, sequences of 4096 tokens without padding, 34.1 GB usable on each accelerator.
# Assumes a common server where you stated nothing: host_bytes_per_node = 8.246e+11.
set -euo pipefail
directory="$(cd "$(dirname "$0")" && pwd)"
exec accelerate launch --config_file "$directory"/accelerate.yaml -m shardwright.trainers.train_causal_lm --model meta-llama/Llama-2-7b-hf --training-arguments "$directory"/training_arguments.json --seq-len 4096 --output-dir "$directory"/model --plan "$directory" --method lora --lora-rank 16 --lora-targets all-linear "$@"
