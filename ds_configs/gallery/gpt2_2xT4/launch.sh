#!/usr/bin/env bash
# openai-community/gpt2 on 2xT4: ddp, micro-batch 4 x 1, 9.3 of 15.6 GB
# DDP is the simplest layout, and none communicates less: it needs 9.3 GB (8.1 to 10.9) of 15.6 GB, at most in the loss phase: activations 3.3, loss 2.5, optimizer states 0.996, runtime context 0.600; micro-batch 4 without gradient checkpointing.
# Run: accelerate launch --config_file ./accelerate.yaml -m shardwright.trainers.train_causal_lm --model openai-community/gpt2 --training-arguments ./training_arguments.json --seq-len 1024 --output-dir ./model --plan .
# Assumes fp16, adamw_torch_fused, method full, sequences of 1024 tokens without padding, 15.6 GB usable on each accelerator.
# Assumes a common server where you stated nothing: host_bytes_per_node = 1.031e+11.
set -euo pipefail
directory="$(cd "$(dirname "$0")" && pwd)"
exec accelerate launch --config_file "$directory"/accelerate.yaml -m shardwright.trainers.train_causal_lm --model openai-community/gpt2 --training-arguments "$directory"/training_arguments.json --seq-len 1024 --output-dir "$directory"/model --plan "$directory" "$@"
