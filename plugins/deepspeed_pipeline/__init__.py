"""DeepSpeed's pipeline with a Hugging Face model's own modules: enter by `module.py`."""
