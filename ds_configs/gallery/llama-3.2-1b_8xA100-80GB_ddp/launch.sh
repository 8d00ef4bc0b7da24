#!/usr/bin/env bash
# meta-llama/Llama-3.2-1B on 8xA100-80GB: ddp, micro-batch 2 x 2, 60.3 of 85.0 GB
# DDP is the requested strategy. It reaches 128,436 tokens/s (1.02 s per step) and needs 60.3 GB (54.9 to 67.0) of 85.0 GB per accelerator. Micro-batch 2 x 2, no gradient checkpointing. Global batch 32 sequences (131,072 tokens), the same for every layout: 16,384 tokens per accelerator, enough for efficient matrix products in a single micro-batch. Set yours with --global-batch-size. The fastest candidate, DDP with micro-batch 4, no gradient checkpointing, chunked loss, is predicted to be 2.4 % faster, but needs more mechanisms.
# Run: ./launch.sh SCRIPT [ARGUMENTS], or ./launch.sh --dataset FILE --output-dir DIRECTORY
# Assumes bf16, adamw_torch_fused, method full, a model loaded with dtype=torch.float32, sequences of 4096 tokens without padding, 85.0 GB usable per accelerator.
# Assumes the values of a common server: host_bytes_per_node = 1.237e+12.
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
