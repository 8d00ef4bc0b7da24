"""Rounding in the forward pass: enter by `attach.py`, which puts it into a model."""
