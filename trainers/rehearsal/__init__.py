"""A plan's own files on CPU ranks with a shrunken model: start with `rehearse.py`; `worker.py` runs on every rank."""
