"""Which layers a pipeline stage holds: contiguous parts whose most expensive one is as cheap as it can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import Fault, UsageError


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


def balanced_stages(
    layer_costs: Sequence[float], *, embedding_cost: float = 0, head_cost: float = 0, stages: int
) -> tuple[PipelineStage, ...]:
    """Return the stages whose largest cost is smallest; of equal ones the earlier stages are the fuller.

    Dynamic programming over `best(s, n)`, the smallest largest cost of the last `n` layers in `s` stages, in
    O(stages * layers^2). Every stage holds at least one layer.

    Args:
        layer_costs: What each decoder layer costs, in one unit with the other two.
        embedding_cost: What the first stage bears besides.
        head_cost: What the last stage bears besides.
        stages: How many there are.

    Raises:
        UsageError: there are fewer layers than stages.

    >>> [stage.num_layers for stage in balanced_stages([1.0] * 6, head_cost=2.0, stages=2)]
    [4, 2]
    """
    layers = len(layer_costs)
    if not 1 <= stages <= layers:
        rule = f"cannot exceed the {layers} layers"
        raise UsageError(Fault(where="pp", value=stages, rule=rule, fix=f"nearest legal value: {max(1, layers)}"))
    sums = [0.0]
    for cost in layer_costs:
        sums.append(sums[-1] + cost)
    # ends[s][first]: the largest cost of the layers from `first` in s stages, and where the first of these ends.
    ends: list[dict[int, tuple[float, int]]] = [{}, {}]
    for first in range(layers):
        ends[1][first] = (sums[layers] - sums[first] + head_cost + (embedding_cost if stages == 1 else 0), layers)
    for count in range(2, stages + 1):
        ends.append({})
        more = embedding_cost if count == stages else 0
        for first in range(layers - count + 1):
            options = (
                (max(sums[end] - sums[first] + more, ends[count - 1][end][0]), -end)
                for end in range(first + 1, layers - count + 2)
            )
            cost, negative_end = min(options)
            ends[count][first] = (cost, -negative_end)
    found, first = [], 0
    for index in range(stages):
        end = ends[stages - index][first][1]
        found.append(
            PipelineStage(
                index=index,
                first_layer=first,
                end_layer=end,
                has_embedding=index == 0,
                has_head=index == stages - 1,
            )
        )
        first = end
    return tuple(found)


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
