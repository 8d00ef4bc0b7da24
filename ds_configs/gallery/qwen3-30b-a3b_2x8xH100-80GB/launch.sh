#!/usr/bin/env bash
# Qwen/Qwen3-30B-A3B on 2x8xH100-80GB: zero3, micro-batch 4 x 1, 70.1 of 84.9 GB
# ZeRO-3 is the simplest of the layouts that fit and communicate least: it needs 70.1 GB (64.2 to 78.2) of 84.9 GB, at most in the loss phase: loss 29.9, optimizer states 15.3, master weights 7.6, weights 3.8; micro-batch 4 with gradient checkpointing.
# Run: ./launch.sh MACHINE_RANK MAIN_PROCESS_IP on each node, or sbatch ./launch.sbatch
# Assumes bf16, adamw_torch_fused, method full, sequences of 4096 tokens without padding, 84.9 GB usable on each accelerator.
# Assumes a common server where you stated nothing: host_bytes_per_node = 2.199e+12, network_bytes_per_s = 5e+10.
set -euo pipefail
if [ $# -lt 2 ]; then echo "usage: $0 MACHINE_RANK MAIN_PROCESS_IP [TRAINING ARGUMENTS]" >&2; exit 2; fi
directory="$(cd "$(dirname "$0")" && pwd)"
exec accelerate launch --machine_rank "$1" --main_process_ip "$2" --config_file "$directory"/accelerate.yaml -m shardwright.trainers.train_causal_lm --model Qwen/Qwen3-30B-A3B --training-arguments "$directory"/training_arguments.json --seq-len 4096 --output-dir "$directory"/model --plan "$directory" "${@:3}"
