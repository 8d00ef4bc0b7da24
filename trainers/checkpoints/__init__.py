"""Whole checkpoints: `callback.py` marks each one complete when all ranks have saved, and finds the one to resume from.

`record.py` is the file that makes a checkpoint whole, `selection.py` chooses among checkpoints, and `resume_rules.py`
says what may differ between the run that saved and the run that goes on.
"""
