#!/usr/bin/env bash
# openai-community/gpt2 on 1xRTX3090: single, micro-batch 8 x 2, 15.0 of 25.4 GB
# One process is sufficient for one accelerator. It reaches 26,828 tokens/s (0.61 s per step) and needs 15.0 GB (13.5 to 16.7) of 25.4 GB per accelerator. Micro-batch 8 x 2, no gradient checkpointing. Global batch 16 sequences (16,384 tokens), the same for every layout: 16,384 tokens per accelerator, enough for efficient matrix products in a single micro-batch. Set yours with --global-batch-size.
# Run: ./launch.sh SCRIPT [ARGUMENTS], or ./launch.sh --dataset FILE --output-dir DIRECTORY
# Assumes bf16, adamw_torch_fused, method full, a model loaded with dtype=torch.float32, sequences of 1024 tokens without padding, 25.4 GB usable per accelerator.
# Assumes the values of a common server: host_bytes_per_node = 6.872e+10.
set -euo pipefail
if [ $# -lt 1 ]; then echo "usage: $0 SCRIPT [ARGUMENTS], or $0 --dataset FILE --output-dir DIRECTORY [OPTIONS]" >&2; exit 2; fi
directory="$(cd "$(dirname "$0")" && pwd)"
python="$(command -v python || command -v python3)"
# After a script, --dataset is an argument of the script.
case "$1 $* " in
  -*' --dataset '* | -*' --dataset='*)
    set -- train openai-community/gpt2 --plan "$directory" "$@" ;;
  *) set -- launch "$directory" -- "$@" ;;
esac
printf 'Running: shardwright%s\n' "$(printf ' %q' "$@")" >&2
exec "$python" -m shardwright "$@"
