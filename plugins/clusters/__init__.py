"""Starts on several machines in `machines.py`; `node_check.py` compares the machines beforehand."""
