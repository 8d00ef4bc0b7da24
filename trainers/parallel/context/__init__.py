"""Context parallelism of torch under FSDP2: `callback.py`."""
