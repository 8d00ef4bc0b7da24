"""Everything that a launched command does: enter by `run.py`; `ranks.py` is its other side, on every rank."""
