"""Numbers of the page's charts, from a plan: places in percent of an axis, and what each mark says.

The marks themselves are elements of the page (`templates/`), so that they follow its width and its colours, can be
reached by keyboard, and are read aloud.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ...ds_configs.memory.estimate import GpuMemory, terms_by_phase
from ...ds_configs.memory.terms import TERM_MEANINGS, TERM_ROLES, Role
from ...ds_configs.plan.plan import Plan
from ...ds_configs.search.choice import Evaluated, ParetoPoint
from ...ds_configs.search.reasons import display_name
from ...ds_configs.step_time.estimate import StepTime
from ...ds_configs.step_time.terms import TIME_TERM_MEANINGS, time_term_name

LayoutKind = Literal["chosen", "fits", "too large", "analysis"]
_ROLES: tuple[Role, ...] = ("weights", "optimizer", "gradients", "activations", "buckets", "other")
_PHASES = {"init": "loaded", "loss": "forward and loss", "backward": "backward", "step": "optimizer step"}
_OVERHEADS = ("allocator_fragmentation", "runtime_context", "communicators")
_ROOM = 1.04
"""What an axis shows beyond its largest mark."""
_TICKS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """A line of an axis."""

    place: float
    """Percent of the axis."""
    text: str
    """What stands there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """A part of the memory in every phase."""

    name: str
    """What people call it."""
    meaning: str
    """One sentence."""
    role: Role
    """What it is for, which gives its colour."""
    shade: int
    """Its place among the terms of its role, largest first."""
    bytes_of: dict[str, int]
    """Bytes by phase; 0 where it is not there."""

    @property
    def largest(self) -> int:
        """Bytes of the phase that has most of it."""
        return max(self.bytes_of.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryChart:
    """Bytes of the fullest accelerator in each phase of a step, stacked by term."""

    terms: tuple[Term, ...]
    """From the bottom of the stack: by role, then by size."""
    phases: dict[str, str]
    """What people call each phase."""
    peak: str
    """The phase of the peak."""
    scale_bytes: float
    """Right end of the axis."""
    ticks: tuple[Tick, ...]
    """Its lines, in GB."""
    gpu: GpuMemory
    """Peak, interval and capacity."""

    def place(self, count: float) -> float:
        """Return bytes as percent of the axis."""
        return 100 * max(0.0, count) / self.scale_bytes

    def total(self, phase: str) -> int:
        """Return the bytes of a phase."""
        return sum(term.bytes_of[phase] for term in self.terms)


def phases_chart(plan: Plan) -> MemoryChart:
    """Return the memory of the chosen layout by phase and term.

    Tensors are those of each phase. Runtime and communicators stay all the time; what the allocator reserves beyond
    tensors is taken as the same share of them in every phase, as the estimate does in that of the peak.
    """
    gpu = plan.chosen.memory.gpu
    by_phase: dict[str, dict[str, int]] = {
        phase: dict(terms)
        for phase, terms in terms_by_phase(plan.chosen.strategy, plan.model, plan.job, stage=gpu.stage).items()
    }
    for terms in by_phase.values():
        share = sum(terms.values()) / max(1, gpu.allocated_bytes)
        for name in _OVERHEADS:
            count = gpu.terms.get(name, 0)
            terms[name] = round(count * share) if name == "allocator_fragmentation" else count
    phases = {name: text for name, text in _PHASES.items() if name in by_phase}
    names = dict.fromkeys(name for terms in by_phase.values() for name, count in terms.items() if count)
    bytes_of = {name: {phase: by_phase[phase].get(name, 0) for phase in phases} for name in names}
    largest = max(gpu.capacity_bytes, gpu.high_bytes, *(sum(terms.values()) for terms in by_phase.values()))
    scale = largest * _ROOM
    return MemoryChart(
        terms=tuple(_terms(bytes_of)),
        phases=phases,
        peak=gpu.phase,
        scale_bytes=scale,
        ticks=tuple(Tick(place=100 * at * 1e9 / scale, text=f"{at:g}") for at in round_numbers(scale / 1e9)),
        gpu=gpu,
    )


def _terms(bytes_of: dict[str, dict[str, int]]) -> Iterable[Term]:
    for role in _ROLES:
        names = [name for name in bytes_of if TERM_ROLES.get(name, "other") == role]
        for shade, name in enumerate(sorted(names, key=lambda one: -max(bytes_of[one].values()))):
            yield Term(
                name=name.replace("_", " "),
                meaning=TERM_MEANINGS.get(name, ""),
                role=role,
                shade=shade,
                bytes_of=bytes_of[name],
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeRow:
    """A part of a step's time."""

    name: str
    """What people call it."""
    meaning: str
    """One sentence."""
    seconds: float
    """Of one step."""
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
class Layout:
    """A candidate, as a row of the table and a mark of the chart."""

    kind: LayoutKind
    """Whether it was chosen, fits, is too large, or is run by no library."""
    name: str
    """The layout in words."""
    micro_batch: str
    """Sequences of a pass, and how many passes a step has."""
    recomputes: str
    """What the backward pass computes again."""
    high_bytes: int
    """Upper end of its memory on one accelerator."""
    step_seconds: float
    """Predicted time of a step."""
    tokens_per_second: float
    """Predicted speed of all ranks together."""
    reason: str
    """Why it was taken, or what it loses."""


def shown_layout(candidate: Evaluated, *, chosen: bool = False) -> Layout:
    """Return a candidate as the page shows it."""
    strategy, gpu, name = candidate.strategy, candidate.memory.gpu, display_name(candidate.strategy)
    kind: LayoutKind = "fits" if candidate.memory.fits else "too large"
    if strategy.gradient_checkpointing:
        part = "all layers" if strategy.checkpointed_layers is None else f"{strategy.checkpointed_layers} layers"
        recomputes = part + (" but products" if strategy.keeps_products else "")
    else:
        recomputes = "nothing"
    return Layout(
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
    """A place of the chart of layouts."""

    x: float
    """Percent of the axis of memory, which is logarithmic."""
    y: float
    """Percent of the axis of speed, from below."""
    kind: str
    """Of the layout; `frontier` for one that no other beats in both."""
    title: str
    """What it is."""
    figures: str
    """Memory, speed and time."""
    reason: str
    """What it loses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutChart:
    """All candidates: tokens per second against memory, with those that none beats in both."""

    marks: tuple[Mark, ...]
    """Candidates, the chosen one last, so that it lies on top."""
    frontier: tuple[Mark, ...]
    """From the leanest to the fastest."""
    x_ticks: tuple[Tick, ...]
    """In GB."""
    y_ticks: tuple[Tick, ...]
    """In tokens per second."""
    capacity: float
    """Percent of the axis of memory at which the accelerator is full."""


def layout_chart(layouts: Sequence[Layout], pareto: Sequence[ParetoPoint], *, capacity_bytes: int) -> LayoutChart:
    """Return the chart of candidates, whatever their number."""
    sizes = [layout.high_bytes for layout in layouts] + [point.high_bytes for point in pareto] + [capacity_bytes]
    speeds = [layout.tokens_per_second for layout in layouts] + [point.tokens_per_second for point in pareto]
    low, high = math.log(min(sizes) / 1.15), math.log(max(sizes) * 1.15)
    top = max(speeds) * 1.08

    def x(count: float) -> float:
        return 100 * (math.log(count) - low) / (high - low)

    def y(speed: float) -> float:
        return 100 * speed / top

    def mark(one: Layout | ParetoPoint, kind: str, title: str, reason: str) -> Mark:
        figures = f"up to {one.high_bytes / 1e9:,.1f} GB, {one.tokens_per_second:,.0f} tokens/s, "
        figures += f"{one.step_seconds:.3g} s a step"
        place = {"x": x(one.high_bytes), "y": y(one.tokens_per_second)}
        return Mark(kind=kind, title=title, figures=figures, reason=reason, **place)

    candidates = sorted(layouts, key=lambda layout: layout.kind == "chosen")
    frontier = sorted(pareto, key=lambda point: point.high_bytes)
    beaten = "No other layout beats it in both memory and speed."
    return LayoutChart(
        marks=tuple(mark(one, one.kind, _title(one), one.reason) for one in candidates),
        frontier=tuple(mark(one, "frontier", one.label, beaten) for one in frontier),
        x_ticks=tuple(
            Tick(place=x(at * 1e9), text=f"{at:,g}") for at in decade_numbers(math.exp(low) / 1e9, math.exp(high) / 1e9)
        ),
        y_ticks=tuple(Tick(place=y(at), text=f"{at:,g}") for at in round_numbers(top)),
        capacity=x(capacity_bytes),
    )


def _title(layout: Layout) -> str:
    recomputed = "" if layout.recomputes == "nothing" else f", recomputes {layout.recomputes}"
    return f"{layout.name}, micro-batch {layout.micro_batch}{recomputed}"


def round_numbers(end: float) -> list[float]:
    """Return from three to `_TICKS` + 1 round numbers from 0 to an end.

    >>> round_numbers(87)
    [0.0, 20.0, 40.0, 60.0, 80.0]
    """
    rough = end / _TICKS
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * unit for factor in (1, 2, 2.5, 5, 10) if factor * unit >= rough)
    return [index * step for index in range(int(end / step) + 1)]


def decade_numbers(low: float, high: float) -> list[float]:
    """Return numbers for a logarithmic axis: 1, 2 and 5 of each decade, only 1 over many, round ones within one.

    >>> decade_numbers(12, 170), decade_numbers(31, 88)
    ([20.0, 50.0, 100.0], [40.0, 60.0, 80.0])
    """
    found = [
        factor * 10.0**power
        for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for factor in (1, 2, 5)
        if low <= factor * 10.0**power <= high
    ]
    if len(found) <= 2:
        return [number for number in round_numbers(high) if number >= low]
    return found if len(found) <= 2 * _TICKS else [number for number in found if f"{number:e}".startswith("1.")]
