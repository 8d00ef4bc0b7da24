"""Parallelism of a Trainer: one module for each axis, and `planned.py`, which makes the Trainer of a layout."""
