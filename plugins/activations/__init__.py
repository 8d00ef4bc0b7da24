"""Activation bytes of any Transformers model, traced in a process of its own.

Enter by `request.py`; ranges of activations for quantization in `ranges.py`.
"""
