"""Plans from names, and what measured runs teach them: enter by `from_names.py`."""
