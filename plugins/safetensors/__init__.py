"""Files of tensors: `reading.py` is the one reader, strict for every caller; `writing.py` makes files, checkpoints."""
