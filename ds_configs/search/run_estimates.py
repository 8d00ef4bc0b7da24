"""Time of a complete run, and warnings about assumed inputs of a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from ..memory.meanings import KERNEL_MEANINGS
from ..specs.hardware import HardwareSpec
from ..specs.job import TrainingJob
from ..specs.layout import Layout
from ..specs.model import ModelSpec
from ..step_time.estimate import StepTime, estimate_step_time
from ..step_time.rates import constants_of


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEstimate:
    """Time of training on a number of tokens, without interruptions."""

    tokens: float
    steps: int
    seconds: float
    low_seconds: float
    high_seconds: float
    gpu_hours: float

    def __str__(self) -> str:
        hours, low, high = (seconds / 3600 for seconds in (self.seconds, self.low_seconds, self.high_seconds))
        return (
            f"{self.tokens:,.0f} tokens take {self.steps:,} steps, {hours:,.1f} hours ({low:,.1f} to {high:,.1f}), "
            f"{self.gpu_hours:,.0f} GPU hours"
        )


def run_estimate(time: StepTime, hardware: HardwareSpec, *, tokens: float) -> RunEstimate:
    """Return the time of training on `tokens` with a predicted step time."""
    steps = ceil(tokens / (time.tokens_per_second * time.seconds))
    return RunEstimate(
        tokens=tokens,
        steps=steps,
        seconds=steps * time.seconds,
        low_seconds=steps * time.low_seconds,
        high_seconds=steps * time.high_seconds,
        gpu_hours=steps * time.seconds * hardware.world_size / 3600,
    )


_TRUSTED_RANKS = 3360
"""Accelerators of the largest published step used to fit the constants (MT-NLG)."""

_TRUSTED_TOKENS = 262_144
"""Tokens of the longest published sequence used to fit them (torchtitan)."""


def doubts(layout: Layout, model: ModelSpec, hardware: HardwareSpec, job: TrainingJob) -> tuple[str, ...]:
    """Return warnings about inputs of a plan that are assumed, or outside the range checked against measurements."""
    sentences = []
    if model.source == "structure":
        sentences.append(
            f"{model.architecture} has custom code, which was not run; memory and time are derived from its structure"
        )
    if lender := constants_of(hardware.gpu).borrowed_from:
        sentences.append(f"no step times of {hardware.gpu} were available; the constants of {lender} are used")
    if hardware.world_size > _TRUSTED_RANKS:
        sentences.append(f"{hardware.world_size:,} ranks: predictions were checked on up to {_TRUSTED_RANKS:,}")
    if job.seq_len_tokens > _TRUSTED_TOKENS:
        longest = f"predictions were checked on up to {_TRUSTED_TOKENS:,}"
        sentences.append(f"sequences of {job.seq_len_tokens:,} tokens: {longest}")
    if model.dimensions.num_experts:
        sentences.append("predictions were not checked on mixtures of experts")
    used = {
        "torch_compile": job.torch_compile,
        "use_liger_kernel": job.use_liger_kernel,
        "fp8": job.precision == "fp8",
    }
    sentences += [meaning for name, meaning in KERNEL_MEANINGS.items() if used[name]]
    if "network_bytes_per_s" in hardware.assumed:
        half = replace(hardware, network_bytes_per_s=hardware.network_bytes_per_s / 2)
        times = [estimate_step_time(layout, model, cluster, job).seconds for cluster in (half, hardware)]
        sentences.append(
            f"the network is assumed to provide {hardware.network_bytes_per_s / 1e9:g} GB/s per accelerator; with "
            f"half of that a step of this layout takes {times[0] / times[1]:.2f} times as long"
        )
    return tuple(sentences)
