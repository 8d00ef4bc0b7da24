"""What `shardwright qat` does: enter by `run.py`; `worker.py` runs on every rank."""
