"""Samples of tokens, from anywhere.

`samples.py` reads datasets, `text.py` packs text, `models.py` loads what training starts from.
"""
