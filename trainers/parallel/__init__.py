"""One Trainer for a plan's layout: start with `trainer_for.py`; one folder for each axis."""
