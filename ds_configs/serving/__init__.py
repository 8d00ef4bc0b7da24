"""Serving: the memory, the cache and the command line of an engine for one checkpoint: start with `plan.py`."""
