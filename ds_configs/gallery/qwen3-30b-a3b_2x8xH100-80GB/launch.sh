#!/usr/bin/env bash
# Qwen/Qwen3-30B-A3B on 2x8xH100-80GB: zero2+ep2, micro-batch 2 x 1, 75.8 of 84.9 GB
# ZeRO-2 + EP 2 is the layout that loses least of a step among those that fit: it needs 75.8 GB (69.2 to 84.6) of 84.9 GB, at most in the loss phase: weights 32.1, optimizer states 15.3, loss 14.9, master weights 7.6; micro-batch 2 with gradient checkpointing. EP 2 divides the 128 experts of each layer. Of a step of 16,384 tokens for each accelerator (0.76 s of computation) it loses 0.19 s (all-to-alls of EP 0.11, gathers and reductions beyond the computation beside them 0.078). Too large: ZeRO-2 needs up to 116.9 GB: weights 61.1, optimizer states 15.3, master weights 7.6, fp32 gradients 7.6.
# Run: ./launch.sh MACHINE_RANK MAIN_PROCESS_IP on each node, or sbatch ./launch.sbatch
# Assumes bf16, adamw_torch_fused, method full, sequences of 4096 tokens without padding, 84.9 GB usable on each accelerator.
# EP 2: AutoEP of DeepSpeed; the launch line attaches ExpertParallelCallback, which other scripts need too.
# Assumes a common server where you stated nothing: host_bytes_per_node = 2.199e+12, network_bytes_per_s = 5e+10.
set -euo pipefail
if [ $# -lt 2 ]; then echo "usage: $0 MACHINE_RANK MAIN_PROCESS_IP [TRAINING ARGUMENTS]" >&2; exit 2; fi
directory="$(cd "$(dirname "$0")" && pwd)"
exec accelerate launch --machine_rank "$1" --main_process_ip "$2" --config_file "$directory"/accelerate.yaml -m shardwright.trainers.train_causal_lm --model Qwen/Qwen3-30B-A3B --training-arguments "$directory"/training_arguments.json --seq-len 4096 --output-dir "$directory"/model --plan "$directory" "${@:3}"
