"""Tensor parallelism of DeepSpeed for the Trainer."""
