"""Memory of a layout. Start at `estimate.py`, whose `estimate_memory` adds up the terms moment by moment.

`model_states.py` and `activations.py` compute the terms, `rank_parameters.py` what each rank holds.
"""
