"""Reports: one report model with its renderings (`report.py`), and its builders from the files of a command.

`runs.py` builds a `Report` from JSON data, and `make.py` reads directories.
"""
