"""`shardwright train`: enter by `run.py`; `inputs.py` prepares, `worker.py` runs on every rank."""
