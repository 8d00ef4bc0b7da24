"""`shardwright distill`: enter by `run.py`; `run_inputs.py` prepares, `worker.py` runs on every rank."""
