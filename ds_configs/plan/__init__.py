"""The plan, its JSON and the files that run it: start with `plan.py`; `rendering.py` makes the files."""
