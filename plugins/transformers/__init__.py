"""Transformers' models and arguments: heads, attention, checkpoints, loading, and frozen second models."""
