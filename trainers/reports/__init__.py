"""HTML reports, each made from the files that a command left: come in by `make.py`.

`read.py` finds out what lies in a directory and has the room's other files turn it into a `Page` (`page.py`), which
`templates/page.html.j2` shows; `comparison.py` puts several runs side by side.
"""
