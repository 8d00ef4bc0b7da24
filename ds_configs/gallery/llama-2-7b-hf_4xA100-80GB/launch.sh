#!/usr/bin/env bash
# meta-llama/Llama-2-7b-hf on 4xA100-80GB: fsdp2, micro-batch 2 x 1, 74.4 of 85.0 GB
# FSDP2 is the fastest layout that fits. It reaches 15,197 tokens/s (2.16 s per step) and needs 74.4 GB (68.2 to 82.9) of 85.0 GB per accelerator. Micro-batch 2, no gradient checkpointing, chunked loss.
# Run: ./launch.sh SCRIPT [ARGUMENTS], or ./launch.sh --dataset FILE --output-dir DIRECTORY
# Assumes bf16, adamw_torch_fused, method full, sequences of 4096 tokens without padding, 85.0 GB usable per accelerator.
# Requires the package liger-kernel; the training arguments enable its fused head and loss.
# Assumes the values of a common server: host_bytes_per_node = 6.185e+11.
set -euo pipefail
if [ $# -lt 1 ]; then echo "usage: $0 SCRIPT [ARGUMENTS], or $0 --dataset FILE --output-dir DIRECTORY [OPTIONS]" >&2; exit 2; fi
directory="$(cd "$(dirname "$0")" && pwd)"
python="$(command -v python || command -v python3)"
# After a script, --dataset is an argument of the script.
case "$1 $* " in
  -*' --dataset '* | -*' --dataset='*)
    set -- train meta-llama/Llama-2-7b-hf --plan "$directory" "$@" ;;
  *) set -- launch "$directory" -- "$@" ;;
esac
printf 'Running: shardwright%s\n' "$(printf ' %q' "$@")" >&2
exec "$python" -m shardwright "$@"
