"""Quantization-aware training: the numbers of the checkpoint in every forward pass."""
