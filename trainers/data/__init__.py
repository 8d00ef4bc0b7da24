"""Token samples: `sources.py` reads rows, `samples.py` makes samples of them, `models.py` loads models."""
