"""Files of a Hub repository or a local path: `hub.py`."""
