"""Plans from names of models and hardware, and the store of measured runs; start with `from_names.py`."""
