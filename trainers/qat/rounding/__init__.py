"""What rounds in a forward pass: enter by `attach.py`, which puts it into a model."""
