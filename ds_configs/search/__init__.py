"""The choice among all layouts, with its reason and the rejected ones: enter by `choice.py`."""
