"""Moments of a training step at which memory may be the fullest, and terms at each of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, cast

Phase = Literal["init", "generate", "score", "loss", "backward", "step"]
"""Phases of a step; only tasks that generate have `generate` and `score`."""


Moment = Literal[
    "init",
    "generate",
    "score",
    "second_models_forward",
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
"""Moments of a step in order: completions and their scores, of tasks that generate; the forward passes of second
models; that of the last layer; forward and backward pass of the loss; backward pass of the output head and reduction of
its gradients; the same for the last and the first layer; the token embedding; the optimizer step."""


Terms = dict[str, int]


# Of every task; the other moments are phases of their own.
PHASES: Mapping[Moment, Phase] = {
    "init": "init",
    "second_models_forward": "loss",
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


_NAMES = frozenset(PHASES) | frozenset(PHASES.values())


def summed(*parts: Terms) -> Terms:
    """Return the sum of several parts, without terms of 0 bytes.

    >>> summed({"weights": 2, "loss": 0}, {"weights": 1})
    {'weights': 3}
    """
    terms: Terms = {}
    for part in parts:
        for name, count in part.items():
            if count:
                terms[name] = terms.get(name, 0) + count
    return terms


def at_moments(always: Terms, **more: Terms) -> dict[Moment, Terms]:
    """Return the terms of each moment: those of all moments, plus those of a named phase or moment.

    Moments with equal terms share one dictionary, because a search computes thousands of them.

    >>> at_moments({"weights": 2}, backward={"gradients": 1}, step={"gradients": 4})["head_backward"]
    {'weights': 2, 'gradients': 1}
    """
    assert _NAMES.issuperset(more), "every name is a phase or a moment"
    if not more:
        same: Terms = dict(always)
        return dict.fromkeys(PHASES, same)

    def added(terms: Terms, name: str) -> Terms:
        if name not in more:
            return terms
        return summed(terms, more[name])

    phases: dict[Phase, Terms] = {phase: added(dict(always), phase) for phase in dict.fromkeys(PHASES.values())}
    return {
        moment: phases[phase] if moment == phase else added(phases[phase], moment) for moment, phase in PHASES.items()
    }


def fullest_by_phase(moments: Mapping[Moment, Terms]) -> dict[Phase, Terms]:
    """Return the terms of each phase at its fullest moment, the earlier of two equal ones."""
    phases: dict[Phase, Terms] = {}
    for moment, terms in moments.items():
        phase = PHASES[moment] if moment in PHASES else cast(Phase, moment)
        if phase not in phases or sum(terms.values()) > sum(phases[phase].values()):
            phases[phase] = terms
    return phases
