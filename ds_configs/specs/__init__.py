"""The nouns of planning, as frozen dataclasses, with the errors and units that all rooms use.

`model.py`, `hardware.py`, `job.py` and `strategy.py` hold one noun each.
"""
