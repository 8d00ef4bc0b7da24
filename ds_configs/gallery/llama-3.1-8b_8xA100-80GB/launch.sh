#!/usr/bin/env bash
# meta-llama/Llama-3.1-8B on 8xA100-80GB: zero2, micro-batch 1 x 4, 66.6 of 85.0 GB
# ZeRO-2 is within 0.6 % of the fastest layout (FSDP2) and is simpler. It reaches 27,560 tokens/s (4.76 s per step) and needs 66.6 GB (60.8 to 74.1) of 85.0 GB per accelerator. Micro-batch 1 x 4, no gradient checkpointing. Global batch 32 sequences (131,072 tokens), the same for every layout: 16,384 tokens per accelerator, enough for efficient matrix products in a single micro-batch. Set yours with --global-batch-size. The fastest candidate, ZeRO-3 with micro-batch 2, no gradient checkpointing, chunked loss, is predicted to be 1.5 % faster, but needs more mechanisms.
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
    set -- train meta-llama/Llama-3.1-8B --plan "$directory" "$@" ;;
  *) set -- launch "$directory" -- "$@" ;;
esac
printf 'Running: shardwright%s\n' "$(printf ' %q' "$@")" >&2
exec "$python" -m shardwright "$@"
