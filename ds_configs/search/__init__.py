"""The choice among all layouts, with its reason and the rejected ones: start with `search.py`."""
