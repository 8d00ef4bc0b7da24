#!/usr/bin/env bash
# meta-llama/Llama-3.1-70B on 8xH100-80GB: zero3+cpu-offload of optimizer, micro-batch 2 x 2, 75.8 of 84.9 GB
# ZeRO-3 + CPU offload of optimizer is the fastest layout that fits. It reaches 2,298 tokens/s (57.04 s per step) and needs 75.8 GB (69.3 to 84.2) of 84.9 GB per accelerator. Micro-batch 2 x 2, gradient checkpointing of the first 71 of 80 layers. Global batch 32 sequences (131,072 tokens), the same for every layout: 16,384 tokens per accelerator, enough for efficient matrix products in a single micro-batch. Set yours with --global-batch-size. The fastest candidate, ZeRO-3 + CPU offload of optimizer with micro-batch 4, gradient checkpointing of the first 76 of 80 layers, chunked loss, is predicted to be 0.3 % faster, but needs more mechanisms. Model FLOPs utilization (MFU) is 12.6%; the rest of a step is mostly optimizer on the host (67%), recomputation (7%), matrix products below the peak, with 8,192 tokens per micro-batch (7%).
# Run: ./launch.sh SCRIPT [ARGUMENTS], or ./launch.sh --dataset FILE --output-dir DIRECTORY
# Assumes bf16, adamw_torch_fused, method full, sequences of 4096 tokens without padding, 84.9 GB usable per accelerator.
# Assumes the values of a common server: host_bytes_per_node = 2.199e+12.
set -euo pipefail
if [ $# -lt 1 ]; then echo "usage: $0 SCRIPT [ARGUMENTS], or $0 --dataset FILE --output-dir DIRECTORY [OPTIONS]" >&2; exit 2; fi
directory="$(cd "$(dirname "$0")" && pwd)"
python="$(command -v python || command -v python3)"
# After a script, --dataset is an argument of the script.
case "$1 $* " in
  -*' --dataset '* | -*' --dataset='*)
    set -- train meta-llama/Llama-3.1-70B --plan "$directory" "$@" ;;
  *) set -- launch "$directory" -- "$@" ;;
esac
printf 'Running: shardwright%s\n' "$(printf ' %q' "$@")" >&2
exec "$python" -m shardwright "$@"
