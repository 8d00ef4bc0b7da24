"""Layers of a pipeline stage: contiguous parts of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .errors import Fault


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineStage:
    """One contiguous part of a model."""

    index: int
    """Position of the stage, from 0."""
    first_layer: int
    """Its first decoder layer."""
    end_layer: int
    """One beyond its last decoder layer."""
    has_embedding: bool
    """Whether it embeds the tokens (the first stage)."""
    has_head: bool
    """Whether it holds final norm, output head and loss (the last stage)."""

    @property
    def num_layers(self) -> int:
        """Decoder layers of the stage."""
        return self.end_layer - self.first_layer


def contiguous_stages(ends: Sequence[int]) -> tuple[PipelineStage, ...]:
    """Return the stages of one model that end before these layers.

    >>> [stage.num_layers for stage in contiguous_stages([4, 6])]
    [4, 2]
    """
    last = len(ends) - 1
    return tuple(
        PipelineStage(index=index, first_layer=first, end_layer=end, has_embedding=index == 0, has_head=index == last)
        for index, (first, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True))
    )


def partition_faults(stages: Sequence[PipelineStage], num_layers: int, *, dual_pipe: bool = False) -> list[Fault]:
    """Return the faults of stages that do not hold a model once, in order; DualPipeV needs two for each rank."""
    faults, where = [], "pipeline_stages"
    borders = [0, *(stage.end_layer for stage in stages)]
    whole = borders[-1] == num_layers and all(
        stage.index == index
        and stage.first_layer == borders[index]
        and stage.num_layers >= 1
        and (stage.has_embedding, stage.has_head) == (index == 0, index == len(stages) - 1)
        for index, stage in enumerate(stages)
    )
    if not whole:
        shown = ", ".join(f"{stage.first_layer}-{stage.end_layer}" for stage in stages)
        rule = (
            f"must hold the {num_layers} decoder layers once and in order, at least one each, "
            "embedding first and head last"
        )
        faults.append(Fault(where=where, value=shown, rule=rule, fix="give the number of stages"))
    if dual_pipe and len(stages) % 2:
        rule = f"DualPipeV holds two stages on each rank, and {len(stages)} is odd"
        faults.append(Fault(where=where, rule=rule, fix=f"nearest legal value: {len(stages) + 1}"))
    return faults


def bubble_fraction(stages: int, micro_batches: int) -> float:
    """Return the idle share of a 1F1B step, `(p - 1) / (m + p - 1)` (Megatron-LM, arXiv 2104.04473, section 2.2).

    >>> bubble_fraction(4, 9)
    0.25
    """
    return (stages - 1) / (micro_batches + stages - 1)
