"""DeepSpeed's pipeline with a Hugging Face model's own modules: start with `module.py`."""
