#!/usr/bin/env bash
# Qwen/Qwen2.5-7B on 8xL40S: fsdp2, micro-batch 4 x 1, 39.8 of 47.7 GB
# FSDP2 is the fastest layout that fits. It reaches 21,814 tokens/s (6.01 s per step) and needs 39.8 GB (36.3 to 44.6) of 47.7 GB per accelerator. Micro-batch 4, gradient checkpointing of the first 23 of 28 layers, chunked loss.
# Run: ./launch.sh SCRIPT [ARGUMENTS], or ./launch.sh --dataset FILE --output-dir DIRECTORY
# Assumes bf16, adamw_torch_fused, method full, sequences of 4096 tokens without padding, 47.7 GB usable per accelerator.
# Requires the package liger-kernel; the training arguments enable its fused head and loss.
# Assumes the values of a common server: host_bytes_per_node = 8.246e+11.
set -euo pipefail
if [ $# -lt 1 ]; then echo "usage: $0 SCRIPT [ARGUMENTS], or $0 --dataset FILE --output-dir DIRECTORY [OPTIONS]" >&2; exit 2; fi
directory="$(cd "$(dirname "$0")" && pwd)"
python="$(command -v python || command -v python3)"
# After a script, --dataset is an argument of the script.
case "$1 $* " in
  -*' --dataset '* | -*' --dataset='*)
    set -- train Qwen/Qwen2.5-7B --plan "$directory" "$@" ;;
  *) set -- launch "$directory" -- "$@" ;;
esac
printf 'Running: shardwright%s\n' "$(printf ' %q' "$@")" >&2
exec "$python" -m shardwright "$@"
