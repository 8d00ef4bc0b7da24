#!/usr/bin/env bash
# openai-community/gpt2 on 1xRTX3090: single, micro-batch 8 x 2, 14.8 of 25.4 GB
# One process is sufficient for one accelerator. It reaches 26,828 tokens/s (0.61 s per step) and needs 14.8 GB (13.5 to 16.7) of 25.4 GB per accelerator. Micro-batch 8 x 2, no gradient checkpointing. Global batch 16 sequences (16,384 tokens), the same for every layout: 16,384 tokens per accelerator, so that a single micro-batch can keep every product large. Set yours with --global-batch-size.
# Run: accelerate launch --config_file ./accelerate.yaml -m shardwright.trainers.train_causal_lm --model openai-community/gpt2 --training-arguments ./training_arguments.json --seq-len 1024 --output-dir ./model --plan .
# Assumes bf16, adamw_torch_fused, method full, sequences of 1024 tokens without padding, 25.4 GB usable per accelerator.
# Assumes the values of a common server: host_bytes_per_node = 6.872e+10.
set -euo pipefail
directory="$(cd "$(dirname "$0")" && pwd)"
python="$(command -v python || command -v python3)"
exec "$python" -m shardwright.plugins.launching.elastic accelerate launch --config_file "$directory"/accelerate.yaml -m shardwright.trainers.train_causal_lm --model openai-community/gpt2 --training-arguments "$directory"/training_arguments.json --seq-len 1024 --output-dir "$directory"/model --plan "$directory" "$@"
