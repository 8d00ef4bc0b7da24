"""A plan's own files on CPU ranks with a shrunken model: enter by `rehearse.py`; `worker.py` runs on every rank."""
