"""Charts of reports: `canvas.py` makes a figure and writes it as PNG or SVG, `kinds.py` draws what stands in it."""
