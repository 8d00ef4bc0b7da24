#!/usr/bin/env bash
# meta-llama/Llama-3.1-405B on 128x8xH100-80GB: zero1+tp2+pp32, micro-batch 1 x 256, 70.6 of 84.9 GB
# ZeRO-1 + TP 2 + PP 32 is the fastest layout that fits: 129,258 tokens/s, 129.80 s a step (113.81 to 148.03: matrix products 63.11, recomputation 25.65, memory-bound operations 16.21). It needs 70.6 GB (64.2 to 79.2) of 84.9 GB, at most in the backward phase of stage 0: gradients 21.4, activations in flight 20.9, weights 17.0, optimizer states 4.2; micro-batch 1 x 256 with gradient checkpointing. TP 2 divides the matrices of each layer (128 heads); PP 32 divides the 126 layers, of 256 micro-batches in a step. Too large: ZeRO-1 + TP 2 + PP 16 needs up to 104.4 GB: gradients 34.5, weights 29.7, activations in flight 18.2, optimizer states 3.7; FSDP2 + CPU offload of optimizer and parameters needs up to 45.3 GB: activations 17.5, gathered parameters 12.8, unit gradients 4.2, backward transient 3.6.
# Run: ./launch.sh MACHINE_RANK MAIN_PROCESS_IP on each node, or sbatch ./launch.sbatch
# Assumes bf16, adamw_torch_fused, method full, sequences of 4096 tokens without padding, 84.9 GB usable on each accelerator.
# TP 2: the stages of the pipeline divide their layers by it.
# PP 32: the launch line trains with PipelineTrainer, whose stages follow from the plan.
# Assumes a common server where you stated nothing: host_bytes_per_node = 2.199e+12, network_bytes_per_s = 5e+10.
set -euo pipefail
if [ $# -lt 2 ]; then echo "usage: $0 MACHINE_RANK MAIN_PROCESS_IP [TRAINING ARGUMENTS]" >&2; exit 2; fi
directory="$(cd "$(dirname "$0")" && pwd)"
python="$(command -v python || command -v python3)"
exec "$python" -m shardwright.plugins.launching.elastic accelerate launch --config_file "$directory"/accelerate.yaml --machine_rank "$1" --main_process_ip "$2" --main_process_port "${MAIN_PROCESS_PORT:-29500}" --deepspeed_config_file "$directory"/ds_config.json -m shardwright.trainers.train_causal_lm --model meta-llama/Llama-3.1-405B --training-arguments "$directory"/training_arguments.json --seq-len 4096 --output-dir "$directory"/model --plan "$directory" "${@:3}"
