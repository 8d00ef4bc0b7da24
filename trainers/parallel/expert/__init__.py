"""Expert parallelism of DeepSpeed for the Trainer: `callback.py`."""
