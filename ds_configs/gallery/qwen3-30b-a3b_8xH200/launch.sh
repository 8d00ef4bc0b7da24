#!/usr/bin/env bash
# Qwen/Qwen3-30B-A3B on 8xH200: fsdp2, micro-batch 2 x 2, 134.4 of 150.0 GB
# FSDP2 is the fastest layout that fits. It reaches 104,314 tokens/s (1.26 s per step) and needs 134.4 GB (123.2 to 149.0) of 150.0 GB per accelerator. Micro-batch 2 x 2, gradient checkpointing of the first 16 of 48 layers. Global batch 32 sequences (131,072 tokens), the same for every layout: 16,384 tokens per accelerator, enough for efficient matrix products in a single micro-batch. Set yours with --global-batch-size. The fastest candidate, FSDP2 with micro-batch 4, gradient checkpointing of the first 25 of 48 layers, chunked loss, is predicted to be 2.1 % faster, but needs more mechanisms.
# Run: ./launch.sh SCRIPT [ARGUMENTS], or ./launch.sh --dataset FILE --output-dir DIRECTORY
# Assumes bf16, adamw_torch_fused, method full, a model loaded with dtype=torch.float32, sequences of 4096 tokens without padding, 150.0 GB usable per accelerator.
# Assumes the values of a common server: host_bytes_per_node = 2.199e+12.
set -euo pipefail
if [ $# -lt 1 ]; then echo "usage: $0 SCRIPT [ARGUMENTS], or $0 --dataset FILE --output-dir DIRECTORY [OPTIONS]" >&2; exit 2; fi
directory="$(cd "$(dirname "$0")" && pwd)"
python="$(command -v python || command -v python3)"
# After a script, --dataset is an argument of the script.
case "$1 $* " in
  -*' --dataset '* | -*' --dataset='*)
    set -- train Qwen/Qwen3-30B-A3B --plan "$directory" "$@" ;;
  *) set -- launch "$directory" -- "$@" ;;
esac
printf 'Running: shardwright%s\n' "$(printf ' %q' "$@")" >&2
exec "$python" -m shardwright "$@"
