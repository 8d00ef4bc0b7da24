"""`Term`: one named part of the memory or of the step time of a layout."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Literal, get_args

Role = Literal["weights", "gradients", "optimizer", "activations", "buckets", "other"]
"""Kinds of tensors, as the byte meter distinguishes them."""
ROLES: tuple[Role, ...] = get_args(Role)

Place = Literal["accelerator", "host", "step"]
"""`accelerator` and `host`: bytes of their memory; `step`: seconds."""


@dataclass(frozen=True, slots=True)
class Term:
    """A part of a plan's memory or time, declared in the module that computes it, with its value in a plan."""

    name: str
    meaning: str
    """One sentence for reports and `explain`, with the formula where it is short."""
    _: KW_ONLY
    lives_on: Place = "accelerator"
    role: Role = "other"
    """Kind of its tensors; those that exist only during the optimizer step count as optimizer."""
    label: str = ""
    """Name in tables, if it differs from `name` with spaces."""
    bytes: int | None = None
    seconds: float | None = None

    @property
    def title(self) -> str:
        """Name in tables.

        >>> Term("head_and_loss", "").title
        'head and loss'
        """
        return self.label or self.name.replace("_", " ")


StepTerm = partial(Term, lives_on="step")
"""A part of the step time."""
