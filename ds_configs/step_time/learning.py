"""Corrects predicted step times by the measured steps of earlier runs on the same kind of accelerator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..memory.estimate import moved_factors
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
    """The strategy's label, such as `zero2`."""
    ranks: int
    predicted_seconds: float
    """Without correction by other runs."""
    measured_seconds: float
    """Median step of the slowest rank, without the first steps."""

    @property
    def ratio(self) -> float:
        return self.measured_seconds / self.predicted_seconds


def scaled_time(time: StepTime, scale: float) -> StepTime:
    """Return a step time whose terms all take `scale` times as long."""
    return replace(
        time,
        seconds=time.seconds * scale,
        low_seconds=time.low_seconds * scale,
        high_seconds=time.high_seconds * scale,
        tokens_per_second=time.tokens_per_second / scale,
        terms={name: value * scale for name, value in time.terms.items()},
        learned_scale=time.learned_scale * scale,
    )


def corrected_time(time: StepTime, steps: Sequence[MeasuredStep], *, gpu: str, engine: str) -> StepTime:
    """Return a predicted step time moved towards the ratios of measured to predicted steps.

    Runs of the same accelerator and engine move the prediction and its interval as `moved_factors` does; the published
    prediction counts as one run. Without a run of the engine, those of the other engines move both alike, so that an
    engine is not preferred because it was never measured.
    """
    same_gpu = [step for step in steps if step.gpu == gpu]
    if not same_gpu:
        return time
    own = [step.ratio for step in same_gpu if step.engine == engine]
    published = time.low_seconds / time.seconds, 1.0, time.high_seconds / time.seconds
    low, scale, high = moved_factors(published, own or [step.ratio for step in same_gpu])
    corrected = replace(scaled_time(time, scale), measured_runs=len(own) or len(same_gpu))
    if not own:
        return corrected
    return replace(corrected, low_seconds=time.seconds * low, high_seconds=time.seconds * high)
