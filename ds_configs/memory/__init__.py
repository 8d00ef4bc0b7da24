"""Memory of one accelerator and of its host, every term named: enter by `estimate.py`.

`model_states.py`, `activations.py` and `buffers.py` are the terms; `tensor_terms.py` adds them up moment by moment.
"""
