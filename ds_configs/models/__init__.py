"""From a `config.json` to a `ModelSpec` in closed form, family by family: start with `families.py`."""
