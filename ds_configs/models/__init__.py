"""From a `config.json` to a `ModelSpec` in closed form, family by family: enter by `families.py`."""
