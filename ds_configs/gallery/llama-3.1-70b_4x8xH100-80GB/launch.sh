#!/usr/bin/env bash
# meta-llama/Llama-3.1-70B on 4x8xH100-80GB: zero3, micro-batch 4 x 1, 74.5 of 84.9 GB
# ZeRO-3 is the fastest layout that fits: 26,710 tokens/s, 19.63 s a step (17.21 to 22.39: matrix products 10.57, recomputation 4.63, memory-bound operations 2.13). It needs 74.5 GB (68.3 to 83.0) of 84.9 GB, at most in the loss phase: activations 28.8, optimizer states 17.6, master weights 8.8, weights 4.4; micro-batch 4 with gradient checkpointing of the first 79 of 80 layers, with the chunked loss.
# Run: ./launch.sh MACHINE_RANK MAIN_PROCESS_IP on each node, or sbatch ./launch.sbatch
# Assumes bf16, adamw_torch_fused, method full, sequences of 4096 tokens without padding, 84.9 GB usable on each accelerator.
# Needs the package liger-kernel, whose fused head and loss the training arguments switch on.
# Assumes a common server where you stated nothing: host_bytes_per_node = 2.199e+12, network_bytes_per_s = 5e+10.
set -euo pipefail
if [ $# -lt 2 ]; then echo "usage: $0 MACHINE_RANK MAIN_PROCESS_IP [TRAINING ARGUMENTS]" >&2; exit 2; fi
directory="$(cd "$(dirname "$0")" && pwd)"
python="$(command -v python || command -v python3)"
exec "$python" -m shardwright.plugins.launching.elastic accelerate launch --config_file "$directory"/accelerate.yaml --machine_rank "$1" --main_process_ip "$2" --main_process_port "${MAIN_PROCESS_PORT:-29500}" --deepspeed_config_file "$directory"/ds_config.json -m shardwright.trainers.train_causal_lm --model meta-llama/Llama-3.1-70B --training-arguments "$directory"/training_arguments.json --seq-len 4096 --output-dir "$directory"/model --plan "$directory" "${@:3}"
