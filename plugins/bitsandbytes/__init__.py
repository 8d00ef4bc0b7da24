"""bitsandbytes behind one adapter: `checkpoint.py`."""
