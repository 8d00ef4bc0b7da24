"""One Trainer for a plan's layout: enter by `trainer_for.py`; one folder for each axis."""
