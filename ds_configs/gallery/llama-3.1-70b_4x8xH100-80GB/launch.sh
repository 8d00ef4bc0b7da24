#!/usr/bin/env bash
# meta-llama/Llama-3.1-70B on 4x8xH100-80GB: zero3, micro-batch 2 x 2, 74.7 of 84.9 GB
# ZeRO-3 is within 1.6 % of the fastest layout (FSDP2) and is simpler. It reaches 28,589 tokens/s (18.34 s per step) and needs 74.7 GB (68.2 to 82.9) of 84.9 GB per accelerator. Micro-batch 2 x 2, gradient checkpointing of the first 77 of 80 layers. Global batch 128 sequences (524,288 tokens), the same for every layout: 16,384 tokens per accelerator, enough for efficient matrix products in a single micro-batch. Set yours with --global-batch-size. The fastest candidate, FSDP2 with micro-batch 4, gradient checkpointing of the first 78 of 80 layers, chunked loss, is predicted to be 2.7 % faster, but needs more mechanisms.
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
    set -- train meta-llama/Llama-3.1-70B --plan "$directory" "${places[@]}" "$@" ;;
  *) set -- launch "$directory" "${places[@]}" -- "$@" ;;
esac
printf 'Running: shardwright%s\n' "$(printf ' %q' "$@")" >&2
exec "$python" -m shardwright "$@"
