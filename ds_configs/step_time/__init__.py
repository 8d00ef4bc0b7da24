"""Predicted time of a training step, every term named: start with `estimate.py`."""
