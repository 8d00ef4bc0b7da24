"""Ulysses sequence parallelism for the Trainer: `callback.py`."""
