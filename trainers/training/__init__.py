"""`shardwright train` and `launch`: start with `task.py` and `script.py`; `rank.py` runs on ranks."""
