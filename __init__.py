"""Shardwright: plans DeepSpeed and Accelerate training, proves the plan, and runs it."""

__version__ = "0.1.0"
