"""Runs of launched commands: enter by `run.py`; `ranks.py` is its other side, on every rank."""
