#!/usr/bin/env bash
# mistralai/Mixtral-8x7B-v0.1 on 4x8xA100-80GB: zero3, micro-batch 4 x 1, 72.1 of 85.0 GB
# ZeRO-3 is within 4.4 % of the fastest layout (ZeRO-3 + EP 8) and needs fewer mechanisms. It reaches 56,964 tokens/s (9.20 s per step) and needs 72.1 GB (65.9 to 80.1) of 85.0 GB per accelerator. Micro-batch 4, gradient checkpointing of the first 28 of 32 layers. Global batch 128 sequences (524,288 tokens), the same for every layout: 16,384 tokens per accelerator, enough for efficient matrix products in a single micro-batch. Set yours with --global-batch-size. The fastest candidate, ZeRO-3 + EP 8 with micro-batch 2, gradient checkpointing of the first 19 of 32 layers, chunked loss, is predicted to be 4.4 % faster, but needs more mechanisms.
# Run: ./launch.sh MACHINE_RANK MAIN_PROCESS_IP SCRIPT [ARGUMENTS] on each node, or sbatch ./launch.sbatch SCRIPT [ARGUMENTS]
# Assumes bf16, adamw_torch_fused, method full, sequences of 4096 tokens without padding, 85.0 GB usable per accelerator.
# Assumes the values of a common server: host_bytes_per_node = 1.237e+12, network_bytes_per_s = 2.5e+10.
set -euo pipefail
if [ $# -lt 3 ]; then echo "usage: $0 MACHINE_RANK MAIN_PROCESS_IP SCRIPT [ARGUMENTS], or $0 MACHINE_RANK MAIN_PROCESS_IP --dataset FILE --output-dir DIRECTORY [OPTIONS]" >&2; exit 2; fi
directory="$(cd "$(dirname "$0")" && pwd)"
python="$(command -v python || command -v python3)"
places=(--node-rank "$1" --main-address "$2" --main-port "${MAIN_PROCESS_PORT:-29500}")
shift 2
# After a script, --dataset is an argument of the script.
case "$1 $* " in
  -*' --dataset '* | -*' --dataset='*)
    set -- train mistralai/Mixtral-8x7B-v0.1 --plan "$directory" "${places[@]}" "$@" ;;
  *) set -- launch "$directory" "${places[@]}" -- "$@" ;;
esac
printf 'Running: shardwright%s\n' "$(printf ' %q' "$@")" >&2
exec "$python" -m shardwright "$@"
