"""Losses as pure functions of tensors, without a Trainer; the entry point is `objective.py`."""
