#!/usr/bin/env bash
# meta-llama/Llama-3.1-8B on 8xH100-80GB: fsdp2, micro-batch 1 x 4, 53.0 of 84.9 GB
# FSDP2 is the requested strategy. It reaches 70,039 tokens/s (1.87 s per step) and needs 53.0 GB (48.2 to 58.9) of 84.9 GB per accelerator. Micro-batch 1 x 4, no gradient checkpointing. Global batch 32 sequences (131,072 tokens), the same for every layout: 16,384 tokens per accelerator, enough for efficient matrix products in a single micro-batch. Set yours with --global-batch-size. The fastest candidate, FSDP2 with micro-batch 2, gradient checkpointing of the first 1 of 32 layers, chunked loss, is predicted to be 1.6 % faster, but needs more mechanisms.
# Run: ./launch.sh SCRIPT [ARGUMENTS], or ./launch.sh --dataset FILE --output-dir DIRECTORY
# Assumes bf16, adamw_torch_fused, method full, a model loaded with dtype=torch.float32, sequences of 4096 tokens without padding, 84.9 GB usable per accelerator.
# Assumes the values of a common server: host_bytes_per_node = 2.199e+12.
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
