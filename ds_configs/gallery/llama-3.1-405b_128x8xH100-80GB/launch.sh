#!/usr/bin/env bash
# meta-llama/Llama-3.1-405B on 128x8xH100-80GB: zero3, micro-batch 2 x 1, 74.0 of 84.9 GB
# ZeRO-3 is the fastest layout that fits: 150,857 tokens/s, 55.61 s a step (46.72 to 66.19: matrix products 30.36, recomputation 10.17, computation slowed by communication beside it 6.50), and simpler than the fastest, which gains 0.1 %. It needs 74.0 GB (67.8 to 82.4) of 84.9 GB, at most in the loss phase: activations 46.8, loss 12.6, gathered parameters 4.2, optimizer states 3.2; micro-batch 2 with gradient checkpointing of the first 124 of 126 layers.
# Run: ./launch.sh MACHINE_RANK MAIN_PROCESS_IP on each node, or sbatch ./launch.sbatch
# Assumes bf16, adamw_torch_fused, method full, sequences of 4096 tokens without padding, 84.9 GB usable on each accelerator.
# Assumes a common server where you stated nothing: host_bytes_per_node = 2.199e+12, network_bytes_per_s = 5e+10.
set -euo pipefail
if [ $# -lt 2 ]; then echo "usage: $0 MACHINE_RANK MAIN_PROCESS_IP [TRAINING ARGUMENTS]" >&2; exit 2; fi
directory="$(cd "$(dirname "$0")" && pwd)"
exec accelerate launch --machine_rank "$1" --main_process_ip "$2" --config_file "$directory"/accelerate.yaml -m shardwright.trainers.train_causal_lm --model meta-llama/Llama-3.1-405B --training-arguments "$directory"/training_arguments.json --seq-len 4096 --output-dir "$directory"/model --plan "$directory" "${@:3}"
