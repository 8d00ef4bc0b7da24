"""Launchers and ranks that leave nothing behind: enter by `launch.py`."""
