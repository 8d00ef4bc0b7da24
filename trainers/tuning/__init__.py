"""Short real runs of a plan's best layouts: start with `tune.py`; `worker.py` runs on every rank of a trial."""
