"""`SecondModel`: a model that runs beside the trained one, such as a teacher, and where its weights are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .model import ModelSpec

SecondModelRole = Literal["teacher", "reference", "reward", "value"]

TRAINED_ROLES: tuple[SecondModelRole, ...] = ("value",)
"""Roles of models that are trained too, each in a step of its own before that of the trained model."""

Placement = Literal["replica", "sharded", "offloaded", "quantized", "cached", "shared", "layout"]
"""`replica`: a full copy per rank; `sharded`: over all ranks, gathered layer by layer; `offloaded`: in host memory,
copied module by module; `quantized`: 4-bit weights on every rank; `cached`: not loaded, its outputs were stored;
`shared`: the trained model with its adapters disabled; `layout`: trained, with its states as in the layout."""

PlacementOption = Literal["auto", "replica", "sharded", "offloaded", "quantized", "cached", "shared"]
"""Values of an option; with `auto`, the planner chooses."""

AUTOMATIC_PLACEMENTS: tuple[Placement, ...] = ("replica", "sharded", "offloaded")
"""In order of preference. The others change the results (`quantized`) or require a separate run (`cached`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SecondModel:
    """A model whose forward pass every micro-batch needs in addition to that of the trained model."""

    role: SecondModelRole
    spec: ModelSpec
    placement: Placement | Literal["auto"] = "auto"
    trained: bool = False
    """Whether it has gradients and optimizer states too, which the layout places."""

    @property
    def is_imitated(self) -> bool:
        """Whether the loss compares all its logits with those of the trained model."""
        return self.role == "teacher"

    @property
    def planned_placement(self) -> Placement:
        """The placement; `auto` counts as `replica` until the planner has chosen."""
        if self.trained:
            return "layout"
        return "replica" if self.placement == "auto" else self.placement

    def automatic_placements(self, trained: ModelSpec, *, adapters: bool, shards: bool) -> tuple[Placement, ...]:
        """Return the placements to choose from, in order of preference.

        A reference that is the trained model without its `adapters` needs no weights of its own. `shards` is whether an
        engine shards second models: over several ranks, or as TRL does under ZeRO-3 even on one.
        """
        if self.trained:
            return ("layout",)
        separate = tuple(name for name in AUTOMATIC_PLACEMENTS if name != "sharded" or shards)
        has_base = adapters and self.role == "reference" and self.spec == trained
        return ("shared", *separate) if has_base else separate


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementChoice:
    """Selected placement of a second model, and its reason."""

    placement: Placement
    reason: str
    gpu_bytes: int
    """Peak memory of the model on one accelerator: its weights, and gathered weights or activations."""
    host_bytes: int
    """Peak host memory of the model on one node, including loading."""
