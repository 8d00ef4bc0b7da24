"""Tells a forward pass that gradient checkpointing repeats from the first one (seen with torch 2.13)."""

from __future__ import annotations


def in_backward_pass() -> bool:
    """Return whether autograd is computing gradients on this thread, as it is while a checkpointed forward runs again.

    Reentrant and non-reentrant checkpointing both repeat the forward inside of a graph task, whose number torch 2.13
    gives to Python only under a private name.
    """
    import torch

    return bool(torch._C._current_graph_task_id() != -1)
