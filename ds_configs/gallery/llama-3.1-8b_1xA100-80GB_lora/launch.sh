#!/usr/bin/env bash
# meta-llama/Llama-3.1-8B on 1xA100-80GB: single, micro-batch 1 x 4, 54.3 of 85.0 GB
# One process is sufficient for one accelerator. It reaches 4,736 tokens/s (3.46 s per step) and needs 54.3 GB (49.8 to 60.3) of 85.0 GB per accelerator. Micro-batch 1 x 4, no gradient checkpointing. Global batch 4 sequences (16,384 tokens), the same for every layout: 16,384 tokens per accelerator, so that a single micro-batch can keep every product large. Set yours with --global-batch-size.
# Run: accelerate launch --config_file ./accelerate.yaml -m shardwright.trainers.train_causal_lm --model meta-llama/Llama-3.1-8B --training-arguments ./training_arguments.json --seq-len 4096 --output-dir ./model --plan . --method lora --lora-rank 16 --lora-targets all-linear
# Assumes bf16, adamw_torch_fused, method lora, sequences of 4096 tokens without padding, 85.0 GB usable per accelerator.
# Assumes the values of a common server: host_bytes_per_node = 1.546e+11.
set -euo pipefail
directory="$(cd "$(dirname "$0")" && pwd)"
python="$(command -v python || command -v python3)"
exec "$python" -m shardwright.plugins.launching.elastic accelerate launch --config_file "$directory"/accelerate.yaml -m shardwright.trainers.train_causal_lm --model meta-llama/Llama-3.1-8B --training-arguments "$directory"/training_arguments.json --seq-len 4096 --output-dir "$directory"/model --plan "$directory" --method lora --lora-rank 16 --lora-targets all-linear "$@"
