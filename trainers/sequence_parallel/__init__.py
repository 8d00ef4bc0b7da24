"""Ulysses sequence parallelism for the Trainer."""
