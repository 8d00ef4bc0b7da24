"""Reports: builders of one report model (`report.py`) from the files of a command, and its renderings.

`plans.py` and `runs.py` build a `Report` from JSON data. `markdown.py` renders it as one Markdown text, and as HTML of
that text; `charts.py` draws, and `make.py` reads directories.
"""
