#!/usr/bin/env bash
# meta-llama/Llama-3.1-405B on 128x8xH100-80GB: zero1+tp2+pp32, micro-batch 1 x 256, 70.6 of 84.9 GB
# ZeRO-1 + TP 2 + PP 32 is the fastest layout that fits. It reaches 129,258 tokens/s (129.80 s per step) and needs 70.6 GB (64.2 to 79.2) of 84.9 GB per accelerator. Micro-batch 1 x 256, gradient checkpointing. TP 2 splits the matrices of each layer (128 heads). PP 32 splits the 126 layers, with 256 micro-batches per step. Too large: ZeRO-1 + TP 2 + PP 16 (up to 104.4 GB), FSDP2 + CPU offload of optimizer and parameters (up to 45.3 GB).
# Run: ./launch.sh MACHINE_RANK MAIN_PROCESS_IP SCRIPT [ARGUMENTS] on each node, or sbatch ./launch.sbatch SCRIPT [ARGUMENTS]
# Assumes bf16, adamw_torch_fused, method full, sequences of 4096 tokens without padding, 84.9 GB usable per accelerator.
# TP 2: the pipeline stages split their layers by it.
# PP 32: launch.sh trains with PipelineTrainer, whose stages follow from the plan.
# Assumes the values of a common server: host_bytes_per_node = 2.199e+12, network_bytes_per_s = 5e+10.
set -euo pipefail
if [ $# -lt 3 ]; then echo "usage: $0 MACHINE_RANK MAIN_PROCESS_IP SCRIPT [ARGUMENTS], or $0 MACHINE_RANK MAIN_PROCESS_IP --dataset FILE --output-dir DIRECTORY [OPTIONS]" >&2; exit 2; fi
directory="$(cd "$(dirname "$0")" && pwd)"
python="$(command -v python || command -v python3)"
places=(--node-rank "$1" --main-address "$2" --main-port "${MAIN_PROCESS_PORT:-29500}")
shift 2
# After a script, --dataset is an argument of the script.
case "$1 $* " in
  -*' --dataset '* | -*' --dataset='*)
    set -- train meta-llama/Llama-3.1-405B --plan "$directory" "${places[@]}" "$@" ;;
  *) set -- launch "$directory" "${places[@]}" -- "$@" ;;
esac
printf 'Running: shardwright%s\n' "$(printf ' %q' "$@")" >&2
exec "$python" -m shardwright "$@"
