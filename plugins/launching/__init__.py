"""Launchers and ranks that leave nothing behind: start with `launch.py`."""
