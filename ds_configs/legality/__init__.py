"""Rules of what combines with what: each says what it forbids and names the nearest legal values.

`rules.py` judges a candidate; `context.py`, `expert.py`, `pipeline.py`, `sequence.py` and `tensor.py` hold the rules of
one axis each, which the trainers apply too.
"""
