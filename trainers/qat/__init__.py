"""Quantization-aware training: forward passes compute with the numbers of the checkpoint."""
