"""`shardwright qat`: start with `task.py`; `rank.py` runs on every rank."""
