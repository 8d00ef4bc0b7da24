#!/usr/bin/env bash
# Qwen/Qwen2.5-0.5B on 1xRTX4090: single, micro-batch 1 x 4, 22.5 of 25.4 GB
# One process is sufficient for one accelerator. It reaches 13,367 tokens/s (1.23 s per step) and needs 22.5 GB (20.6 to 25.2) of 25.4 GB per accelerator. Micro-batch 1 x 4, gradient checkpointing of the first 7 of 24 layers. Global batch 4 sequences (16,384 tokens), the same for every layout: 16,384 tokens per accelerator, so that a single micro-batch can keep every product large. Set yours with --global-batch-size.
# Run: accelerate launch --config_file ./accelerate.yaml -m shardwright.trainers.train_causal_lm --model Qwen/Qwen2.5-0.5B --training-arguments ./training_arguments.json --seq-len 4096 --output-dir ./model --plan .
# Assumes bf16, adamw_torch_fused, method full, sequences of 4096 tokens without padding, 25.4 GB usable per accelerator.
# Assumes the values of a common server: host_bytes_per_node = 6.872e+10.
set -euo pipefail
directory="$(cd "$(dirname "$0")" && pwd)"
python="$(command -v python || command -v python3)"
exec "$python" -m shardwright.plugins.launching.elastic accelerate launch --config_file "$directory"/accelerate.yaml -m shardwright.trainers.train_causal_lm --model Qwen/Qwen2.5-0.5B --training-arguments "$directory"/training_arguments.json --seq-len 4096 --output-dir "$directory"/model --plan "$directory" "$@"
