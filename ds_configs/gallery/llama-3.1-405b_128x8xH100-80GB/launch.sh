#!/usr/bin/env bash
# meta-llama/Llama-3.1-405B on 128x8xH100-80GB: zero3, micro-batch 2 x 2, 74.2 of 84.9 GB
# ZeRO-3 is within 5.2 % of the fastest layout (FSDP2) and is simpler. It reaches 165,637 tokens/s (101.29 s per step) and needs 74.2 GB (67.8 to 82.4) of 84.9 GB per accelerator. Micro-batch 2 x 2, gradient checkpointing of the first 124 of 126 layers. Global batch 4,096 sequences (16,777,216 tokens), the same for every layout: 16,384 tokens per accelerator, enough for efficient matrix products in a single micro-batch. Set yours with --global-batch-size.
# Run: ./launch.sh MACHINE_RANK MAIN_PROCESS_IP SCRIPT [ARGUMENTS] on each node, or sbatch ./launch.sbatch SCRIPT [ARGUMENTS]
# Assumes bf16, adamw_torch_fused, method full, sequences of 4096 tokens without padding, 84.9 GB usable per accelerator.
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
