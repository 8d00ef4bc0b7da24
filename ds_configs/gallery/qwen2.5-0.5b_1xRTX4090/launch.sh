#!/usr/bin/env bash
# Qwen/Qwen2.5-0.5B on 1xRTX4090: single, micro-batch 4 x 1, 22.0 of 25.4 GB
# One process is sufficient for one accelerator. It reaches 13,000 tokens/s (1.26 s per step) and needs 22.0 GB (20.1 to 24.7) of 25.4 GB per accelerator. Micro-batch 4, gradient checkpointing of the first 13 of 24 layers, chunked loss.
# Run: ./launch.sh SCRIPT [ARGUMENTS], or ./launch.sh --dataset FILE --output-dir DIRECTORY
# Assumes bf16, adamw_torch_fused, method full, sequences of 4096 tokens without padding, 25.4 GB usable per accelerator.
# Requires the package liger-kernel; the training arguments enable its fused head and loss.
# Assumes the values of a common server: host_bytes_per_node = 6.872e+10.
set -euo pipefail
if [ $# -lt 1 ]; then echo "usage: $0 SCRIPT [ARGUMENTS], or $0 --dataset FILE --output-dir DIRECTORY [OPTIONS]" >&2; exit 2; fi
directory="$(cd "$(dirname "$0")" && pwd)"
python="$(command -v python || command -v python3)"
# After a script, --dataset is an argument of the script.
case "$1 $* " in
  -*' --dataset '* | -*' --dataset='*)
    set -- train Qwen/Qwen2.5-0.5B --plan "$directory" "$@" ;;
  *) set -- launch "$directory" -- "$@" ;;
esac
printf 'Running: shardwright%s\n' "$(printf ' %q' "$@")" >&2
exec "$python" -m shardwright "$@"
