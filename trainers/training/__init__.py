"""`shardwright train` and `launch`: start with `task.py` and `script.py`; `rank.py`, `script_rank.py` run on ranks."""
