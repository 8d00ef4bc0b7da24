"""Corrects predicted step times by the measured steps of earlier runs on the same kind of accelerator.

All steps of an accelerator and engine get one factor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..memory.estimate import moved_factors
from ..specs.hardware import HardwareSpec
from .estimate import StepTime


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
    """The layout's label, such as `zero2`."""
    ranks: int
    predicted_seconds: float
    """Without correction by other runs."""
    measured_seconds: float
    """Median step of the slowest rank, without the first steps."""
    flops_per_s: float | None = None
    """Of the planned accelerator; `None` for that of the catalog."""
    release: str | None = None
    """Release of Shardwright that predicted the step."""

    @property
    def ratio(self) -> float:
        return self.measured_seconds / self.predicted_seconds


def _scaled_time(time: StepTime, scale: float) -> StepTime:
    return replace(
        time,
        seconds=time.seconds * scale,
        low_seconds=time.low_seconds * scale,
        high_seconds=time.high_seconds * scale,
        tokens_per_second=time.tokens_per_second / scale,
        terms={name: seconds * scale for name, seconds in time.terms.items()},
        learned_scale=time.learned_scale * scale,
    )


def published_time(time: StepTime) -> StepTime:
    """Return a step time without the correction by measured runs."""
    return _scaled_time(time, 1 / time.learned_scale)


def comparable_steps(
    steps: tuple[MeasuredStep, ...], hardware: HardwareSpec, engine: str
) -> tuple[tuple[MeasuredStep, ...], bool]:
    """Return the steps that correct an engine on some hardware, and whether they are of this engine.

    Without a run of the engine, those of the other engines count, so that an engine is not preferred because it was
    never measured. Runs of a plan with other FLOP/s, such as those of a named and a measured CPU, do not compare.
    """
    like = tuple(s for s in steps if s.gpu == hardware.gpu and s.flops_per_s in (None, hardware.flops_per_s))
    own = tuple(step for step in like if step.engine == engine)
    return own or like, bool(own)


def corrected_time(time: StepTime, steps: tuple[MeasuredStep, ...], *, hardware: HardwareSpec, engine: str) -> StepTime:
    """Return a predicted step time moved towards the measured steps of the accelerator.

    The runs move the prediction and its interval as `moved_factors` does; the published prediction counts as one run.
    """
    runs, is_own = comparable_steps(steps, hardware, engine)
    if not runs:
        return time
    published = time.low_seconds / time.seconds, 1.0, time.high_seconds / time.seconds
    low, middle, high = moved_factors(published, [run.ratio for run in runs])
    corrected = replace(_scaled_time(time, middle), measured_runs=len(runs))
    if not is_own:
        return corrected
    return replace(
        corrected, low_seconds=corrected.seconds * low / middle, high_seconds=corrected.seconds * high / middle
    )
