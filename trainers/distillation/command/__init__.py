"""`shardwright distill`: `task.py` checks, plans and runs; `rank.py` runs on every rank."""
