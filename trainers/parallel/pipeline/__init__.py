"""Pipelines of a Hugging Face model: `trainer.py`."""
