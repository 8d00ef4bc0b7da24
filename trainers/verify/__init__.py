"""Proof of a written checkpoint by a fresh process: `checkpoint.py`."""
