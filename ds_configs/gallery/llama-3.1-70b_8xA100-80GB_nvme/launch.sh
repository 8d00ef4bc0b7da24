#!/usr/bin/env bash
# meta-llama/Llama-3.1-70B on 8xA100-80GB: zero3+nvme-offload of optimizer, cpu-offload of parameters, micro-batch 4 x 1, 72.6 of 85.0 GB
# ZeRO-3 + NVMe offload of optimizer, CPU offload of parameters is the fastest layout that fits. It reaches 282 tokens/s (464.66 s per step) and needs 72.6 GB (66.3 to 80.6) of 85.0 GB per accelerator. Micro-batch 4, gradient checkpointing of the first 77 of 80 layers. Global batch 32 sequences (131,072 tokens), the same for every layout: 16,384 tokens per accelerator, enough for efficient matrix products in a single micro-batch. Set yours with --global-batch-size. The fastest candidate, ZeRO-3 + NVMe offload of optimizer, CPU offload of parameters with micro-batch 4, gradient checkpointing of the first 74 of 80 layers, chunked loss, is predicted to be 0.1 % faster, but needs more mechanisms. Model FLOPs utilization (MFU) is 4.9%; the rest of a step is mostly reads and writes of optimizer states on NVMe (81%), optimizer on the host (8%).
# Run: ./launch.sh SCRIPT [ARGUMENTS], or ./launch.sh --dataset FILE --output-dir DIRECTORY
# Assumes bf16, adamw_torch_fused, method full, sequences of 4096 tokens without padding, 85.0 GB usable per accelerator.
# Assumes the values of a common server: host_bytes_per_node = 1.237e+12.
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
