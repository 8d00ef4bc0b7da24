"""Rules about what can be combined. Each error names the violated rule and the nearest legal values.

`rules.py` checks a layout. Trainers apply the rules of single axes in `axes.py` too.
"""
