"""lm-evaluation-harness behind one adapter: `tasks.py`."""
