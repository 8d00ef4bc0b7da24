"""`SecondModel`: a model that runs beside the trained one, such as a teacher, and where its weights are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .model import ModelSpec

SecondModelRole = Literal["teacher", "reference", "reward", "value"]

Placement = Literal["replica", "sharded", "offloaded", "quantized", "cached"]
"""`replica`: a full copy per rank; `sharded`: over all ranks, gathered layer by layer; `offloaded`: in host memory,
copied module by module; `quantized`: 4-bit weights on every rank; `cached`: not loaded, its outputs were stored."""

PlacementOption = Literal["auto", "replica", "sharded", "offloaded", "quantized", "cached"]
"""Values of an option; with `auto`, the planner chooses."""

AUTOMATIC_PLACEMENTS: tuple[Placement, ...] = ("replica", "sharded", "offloaded")
"""In order of preference. The others change the results (`quantized`) or require a separate run (`cached`)."""

PLACEMENTS: tuple[Placement, ...] = (*AUTOMATIC_PLACEMENTS, "quantized", "cached")


@dataclass(frozen=True, kw_only=True, slots=True)
class SecondModel:
    """A model whose forward pass every micro-batch needs in addition to that of the trained model."""

    role: SecondModelRole
    spec: ModelSpec
    placement: PlacementOption = "auto"
    trained: bool = False
    """Whether it is trained too; plans support frozen ones only."""

    @property
    def planned_placement(self) -> Placement:
        """The placement; `auto` counts as `replica` until the planner has chosen."""
        return "replica" if self.placement == "auto" else self.placement


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementCost:
    """Cost of one placement of a second model under the selected layout."""

    placement: Placement
    gpu_bytes: int
    """Peak memory of the model on one accelerator: its weights, and gathered weights or activations."""
    host_bytes: int
    """Peak host memory of the model on one node, including loading."""
    fits: bool
    """Whether it fits together with the trained model."""
    reason: str
    """One sentence: its memory, or its other costs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementChoice:
    """Selected placement of a second model, its reason, and the costs of the other placements."""

    placement: Placement
    reason: str
    gpu_bytes: int
    """Peak memory of the model on one accelerator: its weights, and gathered weights or activations."""
    host_bytes: int
    """Peak host memory of the model on one node, including loading."""
    alternatives: tuple[PlacementCost, ...]
    """The other placements under the same layout and micro-batch size."""
