"""A small model and layout with the structure of the real ones, for rehearsals: start with `config.py`."""
