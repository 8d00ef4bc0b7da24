#!/usr/bin/env bash
# Qwen/Qwen3-30B-A3B on 8xH200: fsdp2, micro-batch 2 x 1, 132.2 of 150.0 GB
# FSDP2 is the fastest layout that fits. It reaches 79,410 tokens/s (0.83 s per step) and needs 132.2 GB (121.5 to 146.8) of 150.0 GB per accelerator. Micro-batch 2, no gradient checkpointing, chunked loss.
# Run: ./launch.sh SCRIPT [ARGUMENTS], or ./launch.sh --dataset FILE --output-dir DIRECTORY
# Assumes bf16, adamw_torch_fused, method full, sequences of 4096 tokens without padding, 150.0 GB usable per accelerator.
# Requires the package liger-kernel; the training arguments enable its fused head and loss.
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
