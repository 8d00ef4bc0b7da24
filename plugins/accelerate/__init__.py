"""Accelerate on ranks without an accelerator: enter by `cpu_ranks.py`."""
