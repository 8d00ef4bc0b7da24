"""A smaller student out of a teacher: enter by `maker.py`."""
