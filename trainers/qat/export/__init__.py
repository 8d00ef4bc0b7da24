"""Export of trained codes as a checkpoint: start with `checkpoint.py`."""
