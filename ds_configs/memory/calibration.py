"""Moves the published allocator interval towards what runs on the user's own accelerators really reserved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..specs.errors import Fault, UsageError

SMALLEST_RATIO, LARGEST_RATIO = 0.5, 2.0
"""Beyond these the run was another one than planned, or the prediction is wrong in a way that no factor mends."""

Factors = tuple[float, float, float]
"""Low, middle and high of a factor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRun:
    """One training run on real accelerators beside its plan."""

    identifier: str
    """SHA-256 of the measurement, in hexadecimal."""
    gpu: str
    """Catalog name of the accelerator, as the plan had it."""
    architecture: str
    """Model class, such as `LlamaForCausalLM`."""
    model: str
    """Hub id or directory."""
    layout: str
    """The strategy's label, such as `zero2`."""
    ranks: int
    """Accelerators that trained."""
    predicted_allocated_bytes: int
    """Tensor bytes at the plan's peak."""
    allocated_peak_bytes: int
    """Largest tensor bytes of any rank."""
    reserved_peak_bytes: int
    """Largest bytes that the caching allocator of any rank held."""
    outside_allocator_bytes: int | None = None
    """Device memory in use beside the allocator at the end: context, communicators, other processes; `None` unknown."""
    step_seconds: float | None = None
    """Median optimizer step of the slowest rank after the first steps; `None` when there were no more."""

    @property
    def ratio(self) -> float:
        """Reserved peak over predicted tensor bytes."""
        return self.reserved_peak_bytes / self.predicted_allocated_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Measured runs that plans may learn from."""

    runs: tuple[MeasuredRun, ...]
    """All runs, of any accelerator and architecture."""

    def ratios(self, *, gpu: str, architecture: str) -> tuple[float, ...]:
        """Return the ratios of the runs on this accelerator with this architecture."""
        return tuple(run.ratio for run in self.runs if (run.gpu, run.architecture) == (gpu, architecture))


def moved_factors(published: Factors, ratios: Sequence[float]) -> Factors:
    """Return the published interval moved towards `n` observed ratios `r`, the published one counting as one run.

    `low = min(min r, (low + n·min r) / (n + 1))`, `high = max(max r, (high + n·max r) / (n + 1))`,
    `middle = (middle + n·mean r) / (n + 1)`. Without ratios nothing changes; every ratio stays inside; a further ratio
    within those seen never widens the interval.

    >>> moved_factors((1.0, 1.5, 2.0), [1.5])
    (1.25, 1.5, 1.75)
    """
    low, middle, high = published
    if not ratios:
        return published
    count = len(ratios)
    smallest, largest, mean = min(ratios), max(ratios), sum(ratios) / count
    return (
        min(smallest, (low + count * smallest) / (count + 1)),
        (middle + count * mean) / (count + 1),
        max(largest, (high + count * largest) / (count + 1)),
    )


def check_ratio(run: MeasuredRun) -> None:
    """Check that a run can be the planned one.

    Raises:
        UsageError: its reserved peak is far from the prediction.
    """
    if not SMALLEST_RATIO <= run.ratio <= LARGEST_RATIO:
        raise UsageError(
            Fault(
                where="reserved peak over predicted allocated bytes",
                value=round(run.ratio, 3),
                rule=f"must be within {SMALLEST_RATIO} and {LARGEST_RATIO} to calibrate with",
                fix="compare the run with its plan: model, sequence length, batch and accelerator",
            )
        )
