"""Fake quantization in the forward pass: start with `attach.py`, which adds it to a model."""
