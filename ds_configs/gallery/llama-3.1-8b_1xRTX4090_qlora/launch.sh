#!/usr/bin/env bash
# meta-llama/Llama-3.1-8B on 1xRTX4090: single, micro-batch 1 x 4, 22.4 of 25.4 GB
# One process is sufficient for one accelerator. It reaches 1,978 tokens/s (8.28 s per step) and needs 22.4 GB (20.4 to 25.1) of 25.4 GB per accelerator. Micro-batch 1 x 4, gradient checkpointing of the first 17 of 32 layers, chunked loss. Global batch 4 sequences (16,384 tokens), the same for every layout: 16,384 tokens per accelerator, so that a single micro-batch can keep every product large. Set yours with --global-batch-size.
# Run: accelerate launch --config_file ./accelerate.yaml -m shardwright.trainers.train_causal_lm --model meta-llama/Llama-3.1-8B --training-arguments ./training_arguments.json --seq-len 4096 --output-dir ./model --plan . --method qlora --lora-rank 16 --lora-targets all-linear
# Assumes bf16, adamw_torch_fused, method qlora, sequences of 4096 tokens without padding, 25.4 GB usable per accelerator.
# Requires the package liger-kernel; the training arguments enable its fused head and loss.
# Assumes the values of a common server: host_bytes_per_node = 6.872e+10.
set -euo pipefail
directory="$(cd "$(dirname "$0")" && pwd)"
python="$(command -v python || command -v python3)"
exec "$python" -m shardwright.plugins.launching.elastic accelerate launch --config_file "$directory"/accelerate.yaml -m shardwright.trainers.train_causal_lm --model meta-llama/Llama-3.1-8B --training-arguments "$directory"/training_arguments.json --seq-len 4096 --output-dir "$directory"/model --plan "$directory" --method qlora --lora-rank 16 --lora-targets all-linear "$@"
