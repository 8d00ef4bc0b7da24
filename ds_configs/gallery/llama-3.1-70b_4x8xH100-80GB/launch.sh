#!/usr/bin/env bash
# meta-llama/Llama-3.1-70B on 4x8xH100-80GB: zero3, micro-batch 2 x 1, 64.7 of 84.9 GB
# ZeRO-3 is the simplest of the layouts that fit and communicate least: it needs 64.7 GB (59.2 to 72.2) of 84.9 GB, at most in the loss phase: optimizer states 17.6, loss 12.6, activations 11.3, master weights 8.8; micro-batch 2 with gradient checkpointing.
# Run: ./launch.sh MACHINE_RANK MAIN_PROCESS_IP on each node, or sbatch ./launch.sbatch
# Assumes bf16, adamw_torch_fused, method full, sequences of 4096 tokens without padding, 84.9 GB usable on each accelerator.
# Assumes a common server where you stated nothing: host_bytes_per_node = 2.199e+12, network_bytes_per_s = 5e+10.
set -euo pipefail
if [ $# -lt 2 ]; then echo "usage: $0 MACHINE_RANK MAIN_PROCESS_IP [TRAINING ARGUMENTS]" >&2; exit 2; fi
directory="$(cd "$(dirname "$0")" && pwd)"
exec accelerate launch --machine_rank "$1" --main_process_ip "$2" --config_file "$directory"/accelerate.yaml -m shardwright.trainers.train_causal_lm --model meta-llama/Llama-3.1-70B --training-arguments "$directory"/training_arguments.json --seq-len 4096 --output-dir "$directory"/model --plan "$directory" "${@:3}"
