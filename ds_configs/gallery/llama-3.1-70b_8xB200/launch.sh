#!/usr/bin/env bash
# meta-llama/Llama-3.1-70B on 8xB200: fsdp2, micro-batch 4 x 1, 169.3 of 191.5 GB
# FSDP2 is the fastest layout that fits. It reaches 16,545 tokens/s (7.92 s per step) and needs 169.3 GB (155.4 to 187.6) of 191.5 GB per accelerator. Micro-batch 4, gradient checkpointing of the first 79 of 80 layers. Global batch 32 sequences (131,072 tokens), the same for every layout: 16,384 tokens per accelerator, enough for efficient matrix products in a single micro-batch. Set yours with --global-batch-size. The fastest candidate, FSDP2 with micro-batch 4, gradient checkpointing of the first 76 of 80 layers, chunked loss, is predicted to be 0.9 % faster, but needs more mechanisms.
# Run: ./launch.sh SCRIPT [ARGUMENTS], or ./launch.sh --dataset FILE --output-dir DIRECTORY
# Assumes bf16, adamw_torch_fused, method full, a model loaded with dtype=torch.float32, sequences of 4096 tokens without padding, 191.5 GB usable per accelerator.
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
