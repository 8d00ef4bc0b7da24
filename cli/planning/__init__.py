"""Plans as people ask for them: enter by `stated.py`; questions about a run, and the gallery, beside it."""
