"""The moments of a training step at which memory can peak, and the phases that they belong to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Phase = Literal["init", "loss", "backward", "step"]
Moment = Literal[
    "init",
    "teacher_forward",
    "last_layer_forward",
    "forward_end",
    "loss_backward",
    "head_backward",
    "after_head",
    "last_layer_backward",
    "after_last_layer",
    "first_layer_backward",
    "after_first_layer",
    "embedding_backward",
    "step",
]
"""In their order: a teacher's forward pass, that of the last layer, the loss while it is computed and
while it is differentiated, the backward pass of the output head and the reduction of its gradients, the same of the
last and of the first layer, the token embedding, the optimizer's update."""

Terms = dict[str, int]

PHASES: Mapping[Moment, Phase] = {
    "init": "init",
    "teacher_forward": "loss",
    "last_layer_forward": "loss",
    "forward_end": "loss",
    "loss_backward": "loss",
    "head_backward": "backward",
    "after_head": "backward",
    "last_layer_backward": "backward",
    "after_last_layer": "backward",
    "first_layer_backward": "backward",
    "after_first_layer": "backward",
    "embedding_backward": "backward",
    "step": "step",
}


def at_moments(always: Mapping[str, int], **more: Mapping[str, int]) -> dict[Moment, Terms]:
    """Return the terms of each moment: those that always live, and more by the name of a phase or a moment.

    >>> at_moments({"weights": 2}, backward={"gradients": 1}, step={"gradients": 4})["head_backward"]
    {'weights': 2, 'gradients': 1}
    """
    assert set(more) <= set(PHASES) | set(PHASES.values()), "every name is a phase or a moment"
    moments: dict[Moment, Terms] = {}
    for moment, phase in PHASES.items():
        terms = dict(always)
        for name in dict.fromkeys((phase, moment)):
            for term, count in more.get(name, {}).items():
                terms[term] = terms.get(term, 0) + count
        moments[moment] = terms
    return moments


def fullest_by_phase(moments: Mapping[Moment, Terms]) -> dict[Phase, Terms]:
    """Return the terms of each phase at its fullest moment; the earlier of two that are equal."""
    phases: dict[Phase, Terms] = {}
    for moment, terms in moments.items():
        phase = PHASES[moment]
        if phase not in phases or sum(terms.values()) > sum(phases[phase].values()):
            phases[phase] = terms
    return phases
