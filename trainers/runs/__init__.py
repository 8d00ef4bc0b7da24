"""Runs of launched commands: start with `run.py`; `ranks.py` is its other side, on every rank."""
