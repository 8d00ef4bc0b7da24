#!/usr/bin/env bash
# meta-llama/Llama-3.1-70B on 8xA100-80GB: zero3+nvme-offload of optimizer, cpu-offload of parameters, micro-batch 4 x 1, 52.9 of 85.0 GB
# ZeRO-3 + NVMe offload of optimizer, CPU offload of parameters is the first layout that fits with the offload you asked for: it needs 52.9 GB (48.3 to 59.1) of 85.0 GB, at most in the loss phase: loss 25.2, activations 22.6, gathered parameters 2.1, allocator fragmentation 1.9; micro-batch 4 with gradient checkpointing.
# Run: accelerate launch --config_file ./accelerate.yaml -m shardwright.trainers.train_causal_lm --model meta-llama/Llama-3.1-70B --training-arguments ./training_arguments.json --seq-len 4096 --output-dir ./model --plan .
# Assumes bf16, adamw_torch_fused, method full, sequences of 4096 tokens without padding, 85.0 GB usable on each accelerator.
# Assumes a common server where you stated nothing: host_bytes_per_node = 1.237e+12.
set -euo pipefail
directory="$(cd "$(dirname "$0")" && pwd)"
exec accelerate launch --config_file "$directory"/accelerate.yaml -m shardwright.trainers.train_causal_lm --model meta-llama/Llama-3.1-70B --training-arguments "$directory"/training_arguments.json --seq-len 4096 --output-dir "$directory"/model --plan "$directory" "$@"
