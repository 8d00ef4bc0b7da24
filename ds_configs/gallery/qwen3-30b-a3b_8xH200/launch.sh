#!/usr/bin/env bash
# Qwen/Qwen3-30B-A3B on 8xH200: fsdp2, micro-batch 2 x 2, 134.2 of 150.0 GB
# FSDP2 is within 1.1 % of the fastest layout (the same layout with micro-batch 2, gradient checkpointing of the first 8 of 48 layers, chunked loss) and needs fewer mechanisms. It reaches 78,335 tokens/s (1.67 s per step) and needs 134.2 GB (123.2 to 149.0) of 150.0 GB per accelerator. Micro-batch 2 x 2, gradient checkpointing of the first 16 of 48 layers. Global batch 32 sequences (131,072 tokens), the same for every layout: 16,384 tokens per accelerator, so that a single micro-batch can keep every product large. Set yours with --global-batch-size.
# Run: accelerate launch --config_file ./accelerate.yaml -m shardwright.trainers.train_causal_lm --model Qwen/Qwen3-30B-A3B --training-arguments ./training_arguments.json --seq-len 4096 --output-dir ./model --plan .
# Assumes bf16, adamw_torch_fused, method full, sequences of 4096 tokens without padding, 150.0 GB usable per accelerator.
# Assumes the values of a common server: host_bytes_per_node = 2.199e+12.
set -euo pipefail
directory="$(cd "$(dirname "$0")" && pwd)"
python="$(command -v python || command -v python3)"
exec "$python" -m shardwright.plugins.launching.elastic accelerate launch --config_file "$directory"/accelerate.yaml -m shardwright.trainers.train_causal_lm --model Qwen/Qwen3-30B-A3B --training-arguments "$directory"/training_arguments.json --seq-len 4096 --output-dir "$directory"/model --plan "$directory" "$@"
