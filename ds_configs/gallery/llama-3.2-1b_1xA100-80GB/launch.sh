#!/usr/bin/env bash
# meta-llama/Llama-3.2-1B on 1xA100-80GB: single, micro-batch 2 x 2, 54.5 of 85.0 GB
# One process is sufficient for one accelerator. It reaches 16,127 tokens/s (1.02 s per step) and needs 54.5 GB (50.0 to 60.6) of 85.0 GB per accelerator. Micro-batch 2 x 2, no gradient checkpointing. Global batch 4 sequences (16,384 tokens), the same for every layout: 16,384 tokens per accelerator, so that a single micro-batch can keep every product large. Set yours with --global-batch-size.
# Run: accelerate launch --config_file ./accelerate.yaml -m shardwright.trainers.train_causal_lm --model meta-llama/Llama-3.2-1B --training-arguments ./training_arguments.json --seq-len 4096 --output-dir ./model --plan .
# Assumes bf16, adamw_torch_fused, method full, sequences of 4096 tokens without padding, 85.0 GB usable per accelerator.
# Assumes the values of a common server: host_bytes_per_node = 1.546e+11.
set -euo pipefail
directory="$(cd "$(dirname "$0")" && pwd)"
python="$(command -v python || command -v python3)"
exec "$python" -m shardwright.plugins.launching.elastic accelerate launch --config_file "$directory"/accelerate.yaml -m shardwright.trainers.train_causal_lm --model meta-llama/Llama-3.2-1B --training-arguments "$directory"/training_arguments.json --seq-len 4096 --output-dir "$directory"/model --plan "$directory" "$@"
