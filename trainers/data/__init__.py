"""Token samples: `sources.py` reads rows, `chat.py` and `samples.py` make samples of them, `models.py` loads models."""
