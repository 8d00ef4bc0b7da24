"""What `shardwright distill` does: enter by `run.py`; `worker.py` runs on every rank."""
