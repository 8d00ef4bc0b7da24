"""Losses as pure functions of tensors, tested without a Trainer: enter by `objective.py`."""
