"""What a training step loses to communication and to idle stages: enter by `step_cost.py`."""
