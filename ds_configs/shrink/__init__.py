"""A small model and layout with the structure of the real ones, for rehearsals: enter by `config.py`."""
