"""Smaller students made from a teacher; the entry point is `maker.py`."""
