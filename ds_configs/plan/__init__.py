"""The plan, its JSON and the files that run it: enter by `plan.py`; `files.py` renders."""
