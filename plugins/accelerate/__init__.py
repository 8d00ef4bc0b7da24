"""Accelerate on CPU ranks, and data loaders without repeated samples."""
