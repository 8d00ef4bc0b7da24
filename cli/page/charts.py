"""Data of the page's charts: positions in percent of an axis, and texts of the marks.

The marks are HTML elements (`templates/`), so that they follow width and colours of the page, and work with keyboards
and screen readers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ...ds_configs.memory.estimate import GpuMemory, terms_by_phase
from ...ds_configs.memory.terms import TERM_MEANINGS, TERM_ROLES, Role
from ...ds_configs.plan.plan import Plan
from ...ds_configs.search.reasons import display_name
from ...ds_configs.search.search import Evaluated, ParetoPoint
from ...ds_configs.step_time.estimate import TIME_TERM_MEANINGS, StepTime, time_term_name

LayoutKind = Literal["chosen", "fits", "too large", "analysis"]
_ROLES: tuple[Role, ...] = ("weights", "optimizer", "gradients", "activations", "buckets", "other")
_PHASES = {"init": "loaded", "loss": "forward and loss", "backward": "backward", "step": "optimizer step"}
_OVERHEADS = ("allocator_fragmentation", "runtime_context", "communicators")
_MARGIN = 1.04
"""End of an axis, as a multiple of its largest value."""
_TICKS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """A line of an axis, at a percentage of its length."""

    place: float
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """A part of the memory in every phase."""

    name: str
    meaning: str
    role: Role
    """Purpose; decides the colour."""
    shade: int
    """Rank among the terms of its role, largest first."""
    bytes_of: dict[str, int]
    """Bytes by phase; 0 in phases without it."""

    @property
    def largest(self) -> int:
        """Largest bytes of any phase."""
        return max(self.bytes_of.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryChart:
    """Bytes of the fullest accelerator in each phase of a step, stacked by term."""

    terms: tuple[Term, ...]
    """From the bottom of the stack: by role, then by size."""
    phases: dict[str, str]
    peak: str
    scale_bytes: float
    ticks: tuple[Tick, ...]
    """Its lines, in GB."""
    gpu: GpuMemory
    """Peak, interval and capacity."""

    def place(self, count: float) -> float:
        """Return bytes as percent of the axis."""
        return 100 * max(0.0, count) / self.scale_bytes

    def total(self, phase: str) -> int:
        return sum(term.bytes_of[phase] for term in self.terms)


def phases_chart(plan: Plan) -> MemoryChart:
    """Return the memory of the selected layout by phase and term.

    Tensors are those of each phase. Runtime and communicators are constant. The allocator's overhead is the same share
    of the tensors in every phase, as in the estimate of the peak.
    """
    gpu = plan.chosen.memory.gpu
    is_gpu = plan.hardware.gpu != "CPU"
    by_phase: dict[str, dict[str, int]] = {
        phase: dict(terms)
        for phase, terms in terms_by_phase(
            plan.chosen.strategy, plan.model, plan.job, stage=gpu.stage, gpu=is_gpu
        ).items()
    }
    for terms in by_phase.values():
        share = sum(terms.values()) / max(1, gpu.allocated_bytes)
        for name in _OVERHEADS:
            count = gpu.terms.get(name, 0)
            terms[name] = round(count * share) if name == "allocator_fragmentation" else count
    phases = {name: text for name, text in _PHASES.items() if name in by_phase}
    names = dict.fromkeys(name for terms in by_phase.values() for name, count in terms.items() if count)
    bytes_of = {name: {phase: by_phase[phase].get(name, 0) for phase in phases} for name in names}
    by_size = sorted(bytes_of, key=lambda name: -max(bytes_of[name].values()))
    largest = max(gpu.capacity_bytes, gpu.high_bytes, *(sum(terms.values()) for terms in by_phase.values()))
    scale = largest * _MARGIN
    return MemoryChart(
        terms=tuple(
            Term(
                name=name.replace("_", " "),
                meaning=TERM_MEANINGS.get(name, ""),
                role=role,
                shade=shade,
                bytes_of=bytes_of[name],
            )
            for role in _ROLES
            for shade, name in enumerate(name for name in by_size if TERM_ROLES.get(name, "other") == role)
        ),
        phases=phases,
        peak=gpu.phase,
        scale_bytes=scale,
        ticks=tuple(Tick(place=100 * at * 1e9 / scale, text=f"{at:g}") for at in round_numbers(scale / 1e9)),
        gpu=gpu,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeRow:
    """A part of a step's time."""

    name: str
    meaning: str
    seconds: float
    share: float
    """Percent of the step."""
    width: float
    """Percent of the largest part."""


def time_rows(time: StepTime) -> tuple[TimeRow, ...]:
    """Return the parts of a step's time, largest first."""
    largest = max(time.terms.values())
    return tuple(
        TimeRow(
            name=time_term_name(name),
            meaning=TIME_TERM_MEANINGS.get(name, ""),
            seconds=seconds,
            share=100 * seconds / time.seconds,
            width=100 * seconds / largest,
        )
        for name, seconds in sorted(time.terms.items(), key=lambda item: -item[1])
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownLayout:
    """A candidate as a row of the table and a mark of the chart."""

    kind: LayoutKind
    """`analysis`: no library runs it."""
    name: str
    micro_batch: str
    """Sequences per pass × passes per step."""
    recomputes: str
    high_bytes: int
    """Upper end of the memory per accelerator."""
    step_seconds: float
    tokens_per_second: float
    """Of all ranks."""
    reason: str


def shown_layout(candidate: Evaluated, *, chosen: bool = False) -> ShownLayout:
    """Return a candidate as the page shows it."""
    strategy, gpu, name = candidate.strategy, candidate.memory.gpu, display_name(candidate.strategy)
    kind: LayoutKind = "fits" if candidate.memory.fits else "too large"
    if strategy.gradient_checkpointing:
        part = "all layers" if strategy.checkpointed_layers is None else f"{strategy.checkpointed_layers} layers"
        recomputes = part + (" but products" if strategy.keeps_products else "")
    else:
        recomputes = "nothing"
    return ShownLayout(
        kind="chosen" if chosen else "analysis" if candidate.analysis_only else kind,
        name=name,
        micro_batch=f"{strategy.micro_batch_size} × {strategy.gradient_accumulation_steps}",
        recomputes=recomputes,
        high_bytes=gpu.high_bytes,
        step_seconds=candidate.time.seconds,
        tokens_per_second=candidate.time.tokens_per_second,
        reason=candidate.reason.removeprefix(name).strip() if not chosen else candidate.reason,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A mark of the chart of layouts."""

    x: float
    """Percent of the axis of memory, which is logarithmic."""
    y: float
    """Percent of the axis of speed, from below."""
    kind: str
    """Of the layout, or `frontier`."""
    title: str
    figures: str
    """Memory, speed and time."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutChart:
    """All candidates: tokens per second against memory, with the Pareto frontier."""

    marks: tuple[Mark, ...]
    """Candidates, the selected one last, so that it is on top."""
    frontier: tuple[Mark, ...]
    """From the smallest to the fastest."""
    x_ticks: tuple[Tick, ...]
    """In GB."""
    y_ticks: tuple[Tick, ...]
    """In tokens per second."""
    capacity: float
    """Percent of the axis of memory at which the accelerator is full."""


def layout_chart(layouts: Sequence[ShownLayout], pareto: Sequence[ParetoPoint], *, capacity_bytes: int) -> LayoutChart:
    """Return the chart of all candidates."""
    sizes = [layout.high_bytes for layout in layouts] + [point.high_bytes for point in pareto] + [capacity_bytes]
    speeds = [layout.tokens_per_second for layout in layouts] + [point.tokens_per_second for point in pareto]
    low, high = math.log(min(sizes) / 1.15), math.log(max(sizes) * 1.15)
    top = max(speeds) * 1.08

    def x(count: float) -> float:
        return 100 * (math.log(count) - low) / (high - low)

    def y(speed: float) -> float:
        return 100 * speed / top

    def mark(layout: ShownLayout | ParetoPoint, kind: str, title: str, reason: str) -> Mark:
        figures = f"up to {layout.high_bytes / 1e9:,.1f} GB, {layout.tokens_per_second:,.0f} tokens/s, "
        figures += f"{layout.step_seconds:.3g} s per step"
        position = {"x": x(layout.high_bytes), "y": y(layout.tokens_per_second)}
        return Mark(kind=kind, title=title, figures=figures, reason=reason, **position)

    candidates = sorted(layouts, key=lambda layout: layout.kind == "chosen")
    frontier = sorted(pareto, key=lambda point: point.high_bytes)
    best = "No other layout is both smaller and faster."

    def title(layout: ShownLayout) -> str:
        recomputed = "" if layout.recomputes == "nothing" else f", recomputes {layout.recomputes}"
        return f"{layout.name}, micro-batch {layout.micro_batch}{recomputed}"

    return LayoutChart(
        marks=tuple(mark(layout, layout.kind, title(layout), layout.reason) for layout in candidates),
        frontier=tuple(mark(point, "frontier", point.label, best) for point in frontier),
        x_ticks=tuple(
            Tick(place=x(at * 1e9), text=f"{at:,g}") for at in decade_numbers(math.exp(low) / 1e9, math.exp(high) / 1e9)
        ),
        y_ticks=tuple(Tick(place=y(at), text=f"{at:,g}") for at in round_numbers(top)),
        capacity=x(capacity_bytes),
    )


def round_numbers(end: float) -> list[float]:
    """Return three to `_TICKS` + 1 round numbers from 0 to `end`.

    >>> round_numbers(87)
    [0.0, 20.0, 40.0, 60.0, 80.0]
    """
    rough = end / _TICKS
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * unit for factor in (1, 2, 2.5, 5, 10) if factor * unit >= rough)
    return [index * step for index in range(int(end / step) + 1)]


def decade_numbers(low: float, high: float) -> list[float]:
    """Return ticks of a logarithmic axis: 1, 2 and 5 per decade; 1 for many decades; round numbers within one.

    >>> decade_numbers(12, 170), decade_numbers(31, 88)
    ([20.0, 50.0, 100.0], [40.0, 60.0, 80.0])
    """
    ticks = [
        factor * 10.0**power
        for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for factor in (1, 2, 5)
        if low <= factor * 10.0**power <= high
    ]
    if len(ticks) <= 2:
        return [number for number in round_numbers(high) if number >= low]
    return ticks if len(ticks) <= 2 * _TICKS else [number for number in ticks if f"{number:e}".startswith("1.")]
