"""Predicted time of a training step, every term named: enter by `estimate.py`."""
