#!/usr/bin/env bash
# meta-llama/Llama-2-7b-hf on 8xV100-32GB: zero3, micro-batch 1 x 4, 28.8 of 34.1 GB
# ZeRO-3 is the fastest layout that fits. It reaches 13,001 tokens/s (10.08 s per step) and needs 28.8 GB (26.0 to 32.2) of 34.1 GB per accelerator. Micro-batch 1 x 4, no gradient checkpointing. Global batch 32 sequences (131,072 tokens), the same for every layout: 16,384 tokens per accelerator, enough for efficient matrix products in a single micro-batch. Set yours with --global-batch-size. The fastest candidate, ZeRO-3 with micro-batch 1, no gradient checkpointing, chunked loss, is predicted to be 0.1 % faster, but needs more mechanisms.
# Run: ./launch.sh SCRIPT [ARGUMENTS], or ./launch.sh --dataset FILE --output-dir DIRECTORY
# Assumes fp16, adamw_torch_fused, method lora, sequences of 4096 tokens without padding, 34.1 GB usable per accelerator.
# Assumes the values of a common server: host_bytes_per_node = 8.246e+11.
set -euo pipefail
if [ $# -lt 1 ]; then echo "usage: $0 SCRIPT [ARGUMENTS], or $0 --dataset FILE --output-dir DIRECTORY [OPTIONS]" >&2; exit 2; fi
directory="$(cd "$(dirname "$0")" && pwd)"
python="$(command -v python || command -v python3)"
# After a script, --dataset is an argument of the script.
case "$1 $* " in
  -*' --dataset '* | -*' --dataset='*)
    set -- train meta-llama/Llama-2-7b-hf --plan "$directory" "$@" ;;
  *) set -- launch "$directory" -- "$@" ;;
esac
printf 'Running: shardwright%s\n' "$(printf ' %q' "$@")" >&2
exec "$python" -m shardwright "$@"
