"""Layers divided over ranks by DeepSpeed AutoTP: `callback.py`."""
