"""Places of a frozen teacher while a student trains, and what each of them costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TeacherPlacement = Literal["replica", "sharded", "offloaded", "quantized", "cached"]
"""`replica`: whole on every rank; `sharded`: over all ranks, gathered layer by layer; `offloaded`: in host memory,
copied module by module; `quantized`: 4-bit weights on every rank; `cached`: not there, its answers were stored."""

TeacherPlacementChoice = Literal["auto", "replica", "sharded", "offloaded", "quantized", "cached"]
"""What a user may ask for; `auto` leaves it to the planner."""

AUTOMATIC_PLACEMENTS: tuple[TeacherPlacement, ...] = ("replica", "sharded", "offloaded")
"""In the order of preference. The others change the numbers (`quantized`) or need a run of their own (`cached`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherCost:
    """Cost of one placement of the teacher under the chosen layout."""

    placement: TeacherPlacement
    """Where the teacher would live."""
    gpu_bytes: int
    """Most that the teacher holds on one accelerator: its weights and what they are gathered to, or its activations."""
    host_bytes: int
    """Most that it holds in the host memory of one node, while it loads or later."""
    fits: bool
    """Whether student and teacher together fit."""
    reason: str
    """One sentence: what it needs, or what it costs otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherChoice:
    """Placement of the teacher, the reason for it, and the cost of other places."""

    placement: TeacherPlacement
    """Where the teacher lives."""
    reason: str
    """One sentence with numbers."""
    gpu_bytes: int
    """Most that the teacher holds on one accelerator: its weights and what they are gathered to, or its activations."""
    host_bytes: int
    """Most that it holds in the host memory of one node, while it loads or later."""
    alternatives: tuple[TeacherCost, ...]
    """The other placements under the same layout and micro-batch."""
