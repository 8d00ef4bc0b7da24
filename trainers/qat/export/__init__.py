"""From trained weights to the checkpoint that holds their codes: enter by `checkpoint.py`."""
