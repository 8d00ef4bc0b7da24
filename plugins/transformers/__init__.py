"""Transformers' models and arguments: heads, attention, checkpoints, loading, and a frozen teacher."""
