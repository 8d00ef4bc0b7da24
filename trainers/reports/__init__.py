"""Reports: builders of one report model (`report.py`) from the files of a command, and its renderings.

`plans.py` and `runs.py` build a `Report` from JSON data. `markdown.py` renders it as one Markdown text, as HTML of that
text and as a picture; `charts.py` draws, and `make.py` reads directories.
"""
