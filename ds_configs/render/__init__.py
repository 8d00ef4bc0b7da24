"""Turns a plan into the files that DeepSpeed, Accelerate and schedulers read."""
