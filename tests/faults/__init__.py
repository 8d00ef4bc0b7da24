"""Fault injection and its outcomes.

`injection.py` breaks a rank at a step and phase, `layouts.py` holds the engines that train, and `broken_models.py` are
models that no command may take. One question decides: equal losses to the run without the fault, or an error that names
it.
"""
