"""AutoRound behind one adapter: `engine.py`."""
