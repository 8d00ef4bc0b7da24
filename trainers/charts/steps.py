"""Curves of a training's logged steps: which values of `metrics.jsonl` stand in which chart, and their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .canvas import BLUE, CYAN, GREEN, GREY, RED, YELLOW, Draw
from .kinds import Points, curves

LOSSES = {
    "loss": ("loss", BLUE),
    "student_cross_entropy": ("cross-entropy of the labels", GREEN),
    "teacher_cross_entropy": ("teacher's cross-entropy", GREY),
    "kl_per_token": ("KL(teacher | trained model)", RED),
}
"""Label and colour of what is minimised or measured in nats a token, by its name in the log."""
SHARES = {
    "top1_agreement": ("same most likely token as the teacher", CYAN),
    "speculative_acceptance": ("expected speculative acceptance", YELLOW),
}
"""Likewise of shares of tokens."""

Metrics = Sequence[Mapping[str, Any]]


def points(metrics: Metrics, key: str) -> Points:
    """Return what was logged under a name, with the steps."""
    return [(entry["step"], entry[key]) for entry in metrics if key in entry]


def loss_chart(metrics: Metrics) -> Draw:
    """Return the chart of everything in nats a token."""
    return _named(metrics, LOSSES, "nats a token")


def share_chart(metrics: Metrics) -> Draw:
    """Return the chart of shares of tokens."""
    return _named(metrics, SHARES, "share of tokens")


def rate_chart(metrics: Metrics) -> Draw:
    """Return the chart of the learning rate."""
    return curves({"learning rate": points(metrics, "learning_rate")}, "learning rate", colours=[GREEN])


def _named(metrics: Metrics, names: Mapping[str, tuple[str, str]], vertical: str) -> Draw:
    found = {key: points(metrics, key) for key in names}
    series = {names[key][0]: values for key, values in found.items() if values}
    return curves(series, vertical, colours=[names[key][1] for key, values in found.items() if values])
