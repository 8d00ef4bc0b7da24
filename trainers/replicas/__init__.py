"""Batches divided among ranks that each hold the whole model: enter by `launch.py`; `share.py` is its other side."""
