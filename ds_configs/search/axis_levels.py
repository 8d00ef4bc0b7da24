"""Layouts with tensor, pipeline, sequence, context or expert parallelism that the search tries.

One axis at a time beside data parallelism, and tensor with pipeline parallelism, the 3-D layout of large clusters; no
other two run together (`parallel_rules.py`). For families whose stages several ranks cannot hold, the 3-D layout is
costed all the same and marked as analysis only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from ..legality.candidate import Candidate
from ..legality.parallel_rules import AXIS_RULES
from ..specs.errors import Fault
from ..specs.hardware import HardwareSpec
from ..specs.job import StrategyName, TrainingJob
from ..specs.model import ModelSpec
from ..specs.strategy import Strategy

ENGINES_OF_AXIS: Mapping[str, tuple[StrategyName, ...]] = {
    "tp": ("zero1", "zero2"),
    "pp": ("zero1",),
    "sp": ("zero1", "zero2", "zero3"),
    "cp": ("fsdp2",),
    "ep": ("zero1", "zero2", "zero3"),
}
"""Engines and stages that the planner may choose for each axis, by the name of `--strategy`."""

_OFFLOADING_AXES = ("sp", "ep")
"""Axes that are tried together with offload unasked: long sequences and many experts need it."""


def names_for_axes(job: TrainingJob, axes: Mapping[str, int]) -> tuple[StrategyName, ...]:
    """Return the engines to try for these axes.

    That is the one asked for, where the axes were asked for too or run on it, else all that the axes run on.
    """
    if job.strategy != "auto":
        asked = fixes_axes(job) or all(job.strategy in ENGINES_OF_AXIS[axis] for axis in axes)
        return (job.strategy,) if asked else ()
    names: tuple[StrategyName, ...] = ("zero1", "zero2", "zero3", "fsdp2")
    common = tuple(name for name in names if all(name in ENGINES_OF_AXIS[axis] for axis in axes))
    return common or ENGINES_OF_AXIS[next(iter(axes))][:1]


def fixes_axes(job: TrainingJob) -> bool:
    """Return whether the job asks for an axis beyond data parallelism."""
    return any((size or 1) > 1 for size in job.axis_sizes.values())


def axes_to_try(model: ModelSpec, hardware: HardwareSpec, job: TrainingJob, offload: str) -> Iterator[dict[str, int]]:
    """Yield the axes of each layout to try.

    Sizes that the job fixes are yielded as they are, legal or not, so that rules can refuse them; where that is tensor
    or pipeline parallelism alone, the other of the two is tried beside it. Where nothing is fixed one axis at a time
    is tried, at every divisor of the ranks that can be legal, and these two together.
    """
    fixed = {axis: size for axis, size in job.axis_sizes.items() if size is not None}
    wanted = {axis: size for axis, size in fixed.items() if size > 1}
    if wanted:
        yield wanted
        if len(wanted) == 1 and offload == "none" and job.teacher is None:
            yield from _beside(wanted, fixed, model, hardware)
        return
    if job.teacher is not None:
        # What trains with a teacher takes the sequence parallelism that it was asked for and nothing else.
        return
    for axis, sizes in _sizes(model, hardware).items():
        automatic = offload == "none" or axis in _OFFLOADING_AXES
        if axis in fixed or not automatic:
            continue
        for size in sizes:
            yield {axis: size}
    if offload == "none" and not fixed.keys() & {"tp", "pp"}:
        for tp, pp in _pairs(model, hardware):
            yield {"tp": tp, "pp": pp}


def _beside(
    wanted: Mapping[str, int], fixed: Mapping[str, int], model: ModelSpec, hardware: HardwareSpec
) -> Iterator[dict[str, int]]:
    """Yield tensor or pipeline parallelism of a fixed size with every size of the other, unless that is fixed too."""
    ((axis, size),) = wanted.items()
    other = {"tp": "pp", "pp": "tp"}.get(axis)
    if other is None or other in fixed:
        return
    for count in _sizes(model, hardware)[other]:
        if hardware.world_size % (size * count) == 0:
            yield {"tp": size, "pp": count} if axis == "tp" else {"tp": count, "pp": size}


def _pairs(model: ModelSpec, hardware: HardwareSpec) -> Iterator[tuple[int, int]]:
    """Yield sizes of tensor and pipeline parallelism that divide the ranks together."""
    sizes = _sizes(model, hardware)
    for tp, pp in product(sizes["tp"], sizes["pp"]):
        if hardware.world_size % (tp * pp) == 0:
            yield tp, pp


def _sizes(model: ModelSpec, hardware: HardwareSpec) -> dict[str, list[int]]:
    world, sizes = hardware.world_size, model.dimensions
    limits = {
        "tp": hardware.gpus_per_node,
        "pp": min(world, sizes.num_layers),
        "sp": min(world, sizes.num_attention_heads),
        "cp": world,
        "ep": min(world, sizes.num_experts),
    }
    divisors = [size for size in range(2, min(world, 1024) + 1) if world % size == 0]
    return {axis: [size for size in divisors if size <= limit] for axis, limit in limits.items()}


def with_axes(strategy: Strategy, axes: Mapping[str, int], hardware: HardwareSpec) -> Strategy:
    """Return a layout with these axes, whose ranks leave its data parallelism."""
    others = 1
    for axis, size in axes.items():
        others *= size if axis != "ep" else 1
    left = max(1, hardware.world_size // max(1, others))
    changes: dict[str, Any] = dict(axes)
    if strategy.dp_shard == 1:
        changes["dp_replicate"] = left
    else:
        changes["dp_shard"] = max(1, left // strategy.dp_replicate)
    return replace(strategy, **changes)


def three_dimensional(
    base: Strategy, model: ModelSpec, hardware: HardwareSpec, job: TrainingJob
) -> Iterator[tuple[Strategy, str]]:
    """Yield layouts of tensor, pipeline and data parallelism together, with the reason why they cannot run.

    Only those whose tensor and pipeline parallelism would each be legal alone.
    """
    if job.strategy != "auto" or any(size is not None for size in job.axis_sizes.values()) or job.teacher is not None:
        return
    for tp, pp in _pairs(model, hardware):
        strategy = with_axes(base, {"tp": tp, "pp": pp}, hardware)
        alone = (with_axes(base, {"tp": tp}, hardware), with_axes(base, {"pp": pp}, hardware))
        if any(_axis_faults(layout, model, hardware, job) for layout in alone):
            continue
        faults = _axis_faults(strategy, model, hardware, job)
        if faults:
            yield strategy, faults[0].rule


def _axis_faults(strategy: Strategy, model: ModelSpec, hardware: HardwareSpec, job: TrainingJob) -> list[Fault]:
    candidate = Candidate(strategy=strategy, model=model, hardware=hardware, job=job)
    return [fault for rule in AXIS_RULES for fault in rule(candidate)]
