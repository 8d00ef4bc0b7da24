"""Serving: checkpoints described for the arithmetic, and engines found, asked and started: enter by `checkpoint.py`."""
