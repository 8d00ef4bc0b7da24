"""Guards that end a run which should not go on: `callback.py` watches for numbers not finite, signals and hangs.

`signals.py` notes that a rank was asked to stop, `hang.py` shows the stacks of a rank that does not move.
"""
