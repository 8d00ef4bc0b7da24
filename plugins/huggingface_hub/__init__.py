"""Files of a Hub repository or a local path: `hub.py` reads what describes a model, `model_directory.py` all of it."""
