"""Reports: one report model with its renderings (`report.py`), built from the files of a command (`runs.py`)."""
