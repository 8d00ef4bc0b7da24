#!/usr/bin/env bash
# mistralai/Mixtral-8x7B-v0.1 on 4x8xA100-80GB: zero3, micro-batch 4 x 1, 43.5 of 85.0 GB
# ZeRO-3 is the simplest of the layouts that fit and communicate least: it needs 43.5 GB (39.6 to 48.7) of 85.0 GB, at most in the backward phase: optimizer states 11.7, backward transient 6.9, master weights 5.8, activations 4.8; micro-batch 4 with gradient checkpointing.
# Run: ./launch.sh MACHINE_RANK MAIN_PROCESS_IP on each node, or sbatch ./launch.sbatch
# Assumes bf16, adamw_torch_fused, method full, sequences of 4096 tokens without padding, 85.0 GB usable on each accelerator.
# Assumes a common server where you stated nothing: host_bytes_per_node = 1.237e+12, network_bytes_per_s = 2.5e+10.
set -euo pipefail
if [ $# -lt 2 ]; then echo "usage: $0 MACHINE_RANK MAIN_PROCESS_IP [TRAINING ARGUMENTS]" >&2; exit 2; fi
directory="$(cd "$(dirname "$0")" && pwd)"
exec accelerate launch --machine_rank "$1" --main_process_ip "$2" --config_file "$directory"/accelerate.yaml -m shardwright.trainers.train_causal_lm --model mistralai/Mixtral-8x7B-v0.1 --training-arguments "$directory"/training_arguments.json --seq-len 4096 --output-dir "$directory"/model --plan "$directory" "${@:3}"
