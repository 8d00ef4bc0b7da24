"""From a `config.json` to a `ModelSpec` from stored shapes: start with `stored_shapes.py`."""
