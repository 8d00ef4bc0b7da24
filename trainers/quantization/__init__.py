"""Quantization: from a model to a checkpoint that was proven to load, and methods that llm-compressor lacks."""
