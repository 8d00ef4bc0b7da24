#!/usr/bin/env bash
# meta-llama/Llama-3.2-1B on 8xA100-40GB: zero1, micro-batch 2 x 2, 36.7 of 42.3 GB
# ZeRO-1 is within 0.9 % of the fastest layout (FSDP2) and is simpler. It reaches 127,371 tokens/s (1.03 s per step) and needs 36.7 GB (33.2 to 40.9) of 42.3 GB per accelerator. Micro-batch 2 x 2, no gradient checkpointing. Global batch 32 sequences (131,072 tokens), the same for every layout: 16,384 tokens per accelerator, enough for efficient matrix products in a single micro-batch. Set yours with --global-batch-size. The fastest candidate, FSDP2 with micro-batch 4, no gradient checkpointing, chunked loss, is predicted to be 1.7 % faster, but needs more mechanisms.
# Run: ./launch.sh SCRIPT [ARGUMENTS], or ./launch.sh --dataset FILE --output-dir DIRECTORY
# Assumes bf16, adamw_torch_fused, method full, sequences of 4096 tokens without padding, 42.3 GB usable per accelerator.
# Assumes the values of a common server: host_bytes_per_node = 1.1e+12.
set -euo pipefail
if [ $# -lt 1 ]; then echo "usage: $0 SCRIPT [ARGUMENTS], or $0 --dataset FILE --output-dir DIRECTORY [OPTIONS]" >&2; exit 2; fi
directory="$(cd "$(dirname "$0")" && pwd)"
python="$(command -v python || command -v python3)"
# After a script, --dataset is an argument of the script.
case "$1 $* " in
  -*' --dataset '* | -*' --dataset='*)
    set -- train meta-llama/Llama-3.2-1B --plan "$directory" "$@" ;;
  *) set -- launch "$directory" -- "$@" ;;
esac
printf 'Running: shardwright%s\n' "$(printf ' %q' "$@")" >&2
exec "$python" -m shardwright "$@"
