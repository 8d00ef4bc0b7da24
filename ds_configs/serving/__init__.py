"""Serving: the memory, the cache and the command line of an engine for one checkpoint: enter by `plan.py`."""
