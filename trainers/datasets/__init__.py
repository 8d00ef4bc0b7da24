"""Datasets as token samples, for everything that trains, calibrates or evaluates."""
