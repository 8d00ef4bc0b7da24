"""Checkpoints of compressed-tensors: `codes.py` computes what they hold, `layout.py` checks their files."""
