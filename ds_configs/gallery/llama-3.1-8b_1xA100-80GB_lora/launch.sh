#!/usr/bin/env bash
# meta-llama/Llama-3.1-8B on 1xA100-80GB: single, micro-batch 1 x 4, 54.5 of 85.0 GB
# One process is sufficient for one accelerator. It reaches 3,850 tokens/s (4.26 s per step) and needs 54.5 GB (49.8 to 60.3) of 85.0 GB per accelerator. Micro-batch 1 x 4, no gradient checkpointing. Global batch 4 sequences (16,384 tokens), the same for every layout: 16,384 tokens per accelerator, enough for efficient matrix products in a single micro-batch. Set yours with --global-batch-size. The fastest candidate, ZeRO-2 + CPU offload of optimizer with micro-batch 2, no gradient checkpointing, chunked loss, is predicted to be 10.4 % faster, but needs more mechanisms.
# Run: ./launch.sh SCRIPT [ARGUMENTS], or ./launch.sh --dataset FILE --output-dir DIRECTORY
# Assumes bf16, adamw_torch_fused, method lora, sequences of 4096 tokens without padding, 85.0 GB usable per accelerator.
# Assumes the values of a common server: host_bytes_per_node = 1.546e+11.
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
