"""Reports: builders of one report model (`report.py`) from the files of a command, and its renderings.

`plans.py` and `runs.py` build a `Report` from JSON data. `report.py` renders it as HTML and PNG, `markdown.py` as
`REPORT.md`; `make.py` reads directories.
"""
