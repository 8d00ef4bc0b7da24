"""Corrects predicted step times by the measured steps of earlier runs on the same kind of accelerator.

Runs of one accelerator and engine give one scale, until they separate what scales differently: computation,
communication between ranks, and the host. They do where a least-squares fit of one factor for each is certain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf, sqrt

from ..memory.estimate import moved_factors
from ..specs.hardware import HardwareSpec
from .estimate import TERMS, StepTime

PARTS = ("compute", "network", "host")
"""Parts of a step whose errors differ; every other term is computation."""

_GROUPINGS = (
    (("compute",), ("network",), ("host",)),
    (("compute", "host"), ("network",)),
    (("compute", "network"), ("host",)),
)
"""Parts with a common factor: the first grouping that runs separate is used."""
_MOST_UNCERTAIN = 0.15
"""Largest standard error of a factor, relative to it."""
_LEAST_NOISE = 0.03
"""Relative noise of a measured step, at least: runs that agree by chance do not make a factor certain."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStep:
    """Measured step time of a run, with the prediction of its plan."""

    identifier: str
    """SHA-256 of the measurement, in hexadecimal."""
    gpu: str
    engine: str
    """`ddp`, `deepspeed`, `fsdp2` or `single`."""
    model: str
    layout: str
    """The strategy's label, such as `zero2`."""
    ranks: int
    predicted_seconds: float
    """Without correction by other runs."""
    measured_seconds: float
    """Median step of the slowest rank, without the first steps."""
    network_seconds: float | None = None
    """Predicted time of communication in `predicted_seconds`; `None` if unknown."""
    host_seconds: float | None = None
    """Predicted time of the host in `predicted_seconds`; `None` if unknown."""
    flops_per_s: float | None = None
    """Of the planned accelerator; `None` for that of the catalog."""
    release: str | None = None
    """Release of Shardwright that predicted the step."""

    def __hash__(self) -> int:
        """Return a cheap hash, because runs are keys of a cache."""
        return hash(self.identifier)

    @property
    def ratio(self) -> float:
        return self.measured_seconds / self.predicted_seconds

    @property
    def shares(self) -> dict[str, float] | None:
        """Parts of the predicted step, which sum to one; `None` if they are unknown."""
        if self.network_seconds is None or self.host_seconds is None:
            return None
        network, host = self.network_seconds / self.predicted_seconds, self.host_seconds / self.predicted_seconds
        return {"compute": 1 - network - host, "network": network, "host": host}


def part_of(term: str) -> str:
    """Return the part of a step that a term belongs to."""
    place = TERMS[term].lives_on if term in TERMS else "accelerator"
    return "compute" if place == "accelerator" else place


def part_seconds(time: StepTime) -> dict[str, float]:
    """Return the seconds of each part of a step."""
    seconds = dict.fromkeys(PARTS, 0.0)
    for name, value in time.terms.items():
        seconds[part_of(name)] += value
    return seconds


def learned_factors(time: StepTime) -> dict[str, float]:
    """Return the factor of each part that measured runs gave a step time; 1 without runs."""
    return time.learned_factors or dict.fromkeys(PARTS, time.learned_scale)


def scaled_time(time: StepTime, factors: Mapping[str, float]) -> StepTime:
    """Return a step time whose terms take a part's factor times as long; the interval keeps its relative width."""
    if len(set(factors.values())) == 1:
        (scale,) = set(factors.values())
        terms = {name: value * scale for name, value in time.terms.items()}
    else:
        terms = {name: value * factors[part_of(name)] for name, value in time.terms.items()}
        scale = sum(terms.values()) / time.seconds
    return replace(
        time,
        seconds=time.seconds * scale,
        low_seconds=time.low_seconds * scale,
        high_seconds=time.high_seconds * scale,
        tokens_per_second=time.tokens_per_second / scale,
        terms=terms,
        learned_scale=time.learned_scale * scale,
    )


def published_time(time: StepTime) -> StepTime:
    """Return a step time without the correction by measured runs."""
    published = scaled_time(time, {part: 1 / factor for part, factor in learned_factors(time).items()})
    return replace(published, learned_factors={})


@dataclass(frozen=True, kw_only=True, slots=True)
class Learned:
    """What runs of an accelerator say about the steps of an engine."""

    runs: tuple[MeasuredStep, ...]
    factors: Mapping[str, float]
    """Of each part; 1 while runs do not separate the parts."""
    ratios: tuple[float, ...]
    """Measured steps divided by predictions that contain the factors."""
    is_own: bool
    """Whether the runs are of this engine."""
    separates: bool
    """Whether runs separate the parts."""


@lru_cache(maxsize=64)
def learned(steps: tuple[MeasuredStep, ...], hardware: HardwareSpec, engine: str) -> Learned | None:
    """Return what stored runs say about an engine on some hardware; `None` without runs of such an accelerator.

    Without a run of the engine, those of the other engines count, so that an engine is not preferred because it was
    never measured. Runs of a plan with other FLOP/s, such as those of a named and a measured CPU, do not compare.
    """
    like = [step for step in steps if step.gpu == hardware.gpu and step.flops_per_s in (None, hardware.flops_per_s)]
    own = [step for step in like if step.engine == engine]
    runs = own or like
    if not runs:
        return None
    separated = separated_factors(runs)
    factors = separated or dict.fromkeys(PARTS, 1.0)
    ratios = []
    for run in runs:
        if separated is None:
            ratios.append(run.ratio)
        elif (shares := run.shares) is not None:
            ratios.append(run.ratio / sum(shares[part] * factors[part] for part in PARTS))
    return Learned(
        runs=tuple(runs), factors=factors, ratios=tuple(ratios), is_own=bool(own), separates=separated is not None
    )


def corrected_time(time: StepTime, steps: tuple[MeasuredStep, ...], *, hardware: HardwareSpec, engine: str) -> StepTime:
    """Return a predicted step time moved towards the measured steps of the accelerator.

    The runs move the prediction and its interval as `moved_factors` does; the published prediction counts as one run.
    Where runs separate the parts of a step, each part gets its factor before.
    """
    known = learned(steps, hardware, engine)
    if known is None:
        return time
    published = time.low_seconds / time.seconds, 1.0, time.high_seconds / time.seconds
    low, middle, high = moved_factors(published, known.ratios)
    factors = {part: factor * middle for part, factor in known.factors.items()}
    corrected = replace(
        scaled_time(time, factors),
        measured_runs=len(known.runs),
        learned_factors=factors if known.separates else {},
    )
    if not known.is_own:
        return corrected
    return replace(
        corrected, low_seconds=corrected.seconds * low / middle, high_seconds=corrected.seconds * high / middle
    )


def separated_factors(runs: Sequence[MeasuredStep]) -> dict[str, float] | None:
    """Return measured over predicted time of each part of a step; `None` if runs do not separate the parts.

    With the predicted shares `x` of a run's parts, its ratio `r` of measured to predicted step is `x . f`. A
    least-squares fit of the relative error gives the factors `f` and their standard errors. These are large where runs
    have similar shares, where a part is small in all runs, and where the runs contradict the model.
    """
    known = [(shares, run.ratio) for run in runs if (shares := run.shares) is not None]
    for parts in _GROUPINGS:
        rows = [[sum(shares[part] for part in group) / ratio for group in parts] for shares, ratio in known]
        if len(rows) < 2 * len(parts):
            continue
        products = [[sum(row[i] * row[j] for row in rows) for j in range(len(parts))] for i in range(len(parts))]
        inverse = _inverse(products)
        if inverse is None:
            continue
        sums = [sum(row[i] for row in rows) for i in range(len(parts))]
        factors = [sum(a * b for a, b in zip(line, sums, strict=True)) for line in inverse]
        residuals = [1 - sum(a * b for a, b in zip(row, factors, strict=True)) for row in rows]
        variance = max(_LEAST_NOISE**2, sum(value**2 for value in residuals) / (len(rows) - len(parts)))
        errors = [sqrt(variance * inverse[i][i]) if inverse[i][i] > 0 else inf for i in range(len(parts))]
        if all(error <= _MOST_UNCERTAIN * factor for error, factor in zip(errors, factors, strict=True)):
            return {part: factor for group, factor in zip(parts, factors, strict=True) for part in group}
    return None


def _inverse(matrix: Sequence[Sequence[float]]) -> list[list[float]] | None:
    """Return the inverse of a small symmetric positive matrix; `None` if it is nearly singular."""
    size = len(matrix)
    rows = [[*row, *(float(i == j) for j in range(size))] for i, row in enumerate(matrix)]
    for i in range(size):
        if rows[i][i] <= 1e-9 * max(matrix[j][j] for j in range(size)):
            return None
        rows[i] = [value / rows[i][i] for value in rows[i]]
        for j in range(size):
            if j != i:
                rows[j] = [value - rows[j][i] * pivot for value, pivot in zip(rows[j], rows[i], strict=True)]
    return [row[size:] for row in rows]
