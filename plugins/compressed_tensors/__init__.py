"""Checkpoints of compressed-tensors: `codes.py` computes their tensors, `layout.py` checks their files."""
