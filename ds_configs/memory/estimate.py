"""Memory of one accelerator as the maximum over the phases of a training step, every term named.

The phases are `init`, `loss` (last layer's forward pass, head and loss), `backward` and `step`. Tensors come from
`tensor_terms.py`; what the runtime and the caching allocator add is an interval. Tensor, expert and pipeline
parallelism leave each rank a smaller model (`parallelism/shares.py`); of a pipeline the fullest stage counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..specs.hardware import HardwareSpec
from ..specs.job import TrainingJob
from ..specs.model import ModelSpec
from ..specs.strategy import Strategy
from .activation_source import ActivationSource
from .calibration import Calibration, moved_factors
from .host_memory import HostMemory, estimate_host_memory
from .moments import Phase, Terms, fullest_by_phase
from .rank_parameters import rank_parameters
from .shares import rank_shares
from .tensor_terms import share_moment_terms

_MB = 10**6


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A quantity that differs between machines."""

    low: float
    """Smallest published value."""
    middle: float
    """Typical value."""
    high: float
    """Largest published value, which decides whether a plan fits."""


CONTEXT_BYTES = Interval(low=350 * _MB, middle=600 * _MB, high=1000 * _MB)
"""CUDA context with kernels and cuBLAS workspace: 0.3-0.5 GB (arXiv 2411.06465), 1 GB with kernels (Ultra-Scale
Playbook)."""

COMMUNICATOR_BYTES = Interval(low=150 * _MB, middle=400 * _MB, high=700 * _MB)
"""Buffers of one NCCL communicator: about 0.5 GB (arXiv 2411.06465)."""

RESERVED_OVER_ALLOCATED = Interval(low=1.007, middle=1.038, high=1.093)
"""Allocator blocks over tensor bytes: minimum, median and maximum of 344 ranks measured on B200 (SimuMax v1.2)."""


ALLOCATED_OVER_PREDICTED = Interval(low=0.95, middle=1.0, high=1.05)
"""Tensor bytes over their prediction: the largest errors of the grid of metered runs, rounded outwards
(docs/measurements/memory.md)."""

RESERVED_OVER_PREDICTED = (
    RESERVED_OVER_ALLOCATED.low * ALLOCATED_OVER_PREDICTED.low,
    RESERVED_OVER_ALLOCATED.middle * ALLOCATED_OVER_PREDICTED.middle,
    RESERVED_OVER_ALLOCATED.high * ALLOCATED_OVER_PREDICTED.high,
)
"""Both together; measured runs move this interval (calibration.py)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuMemory:
    """Bytes on the fullest accelerator."""

    peak_bytes: int
    """Expected peak with runtime and allocator overhead."""
    low_bytes: int
    """Lower end of the interval."""
    high_bytes: int
    """Upper end of the interval, which the fit decision uses."""
    allocated_bytes: int
    """Tensors alone at the peak."""
    capacity_bytes: int
    """What a process can allocate on the accelerator."""
    phase: Phase
    """The phase of the peak."""
    terms: Terms
    """What makes up `peak_bytes`, by name."""
    phases: dict[str, int]
    """Tensor bytes of every phase."""
    calibrated_runs: int = 0
    """Measured runs that moved the allocator's interval; 0 when it is the published one."""
    stage: int | None = None
    """The fullest pipeline stage, which the other fields describe; `None` without a pipeline."""

    @property
    def fits(self) -> bool:
        """Whether the upper end of the interval is within the accelerator's memory."""
        return self.high_bytes <= self.capacity_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Memory of a strategy on the accelerator, the host and NVMe."""

    gpu: GpuMemory
    host: HostMemory
    nvme_capacity_bytes_per_node: int

    @property
    def fits(self) -> bool:
        """Whether accelerator, host and NVMe all suffice."""
        return (
            self.gpu.fits
            and self.host.peak_bytes_per_node <= self.host.capacity_bytes_per_node
            and self.host.nvme_bytes_per_node <= self.nvme_capacity_bytes_per_node
        )


def estimate_memory(
    strategy: Strategy,
    model: ModelSpec,
    hardware: HardwareSpec,
    job: TrainingJob,
    *,
    activations: ActivationSource | None = None,
    calibration: Calibration | None = None,
) -> MemoryEstimate:
    """Return the memory of one strategy: `max over phases of (states + buffers + activations)` plus overheads.

    `activations` supplies traced activation bytes for models without cached coefficients; `calibration` the measured
    runs that move the allocator's interval, of which those on this accelerator with this architecture count.

    Raises:
        UsageError: there are fewer layers than pipeline stages.
        UnknownFamilyError: no cached coefficients and no `activations` given.
    """
    ratios = calibration.ratios(gpu=hardware.gpu, architecture=model.architecture) if calibration else ()
    stages = []
    for share in rank_shares(strategy, model, job):
        phases = fullest_by_phase(share_moment_terms(strategy, share, job, activations))
        phase = max(phases, key=lambda name: sum(phases[name].values()))
        index = None if share.stage is None else share.stage.index
        stages.append(replace(_with_overheads(strategy, hardware, phase, phases, ratios), stage=index))
    return MemoryEstimate(
        gpu=max(stages, key=lambda stage: stage.high_bytes),
        host=estimate_host_memory(strategy, model, hardware, job, rank_parameters(model, job, strategy)),
        nvme_capacity_bytes_per_node=hardware.nvme_bytes_per_node,
    )


def terms_by_phase(
    strategy: Strategy, model: ModelSpec, job: TrainingJob, *, stage: int | None = None
) -> dict[Phase, Terms]:
    """Return the named tensor bytes of every phase at its fullest moment, whose sums are `GpuMemory.phases`.

    Those of a trace are not: it is not kept with a plan. `stage` is `GpuMemory.stage`.

    Raises:
        UnknownFamilyError: neither coefficients nor a bound of the model's structure exist.
    """
    shares = rank_shares(strategy, model, job)
    (share,) = (one for one in shares if (None if one.stage is None else one.stage.index) == stage)
    return fullest_by_phase(share_moment_terms(strategy, share, job))


def _with_overheads(
    strategy: Strategy, hardware: HardwareSpec, phase: Phase, phases: dict[Phase, Terms], ratios: Sequence[float]
) -> GpuMemory:
    allocated = sum(phases[phase].values())
    communicators = 0 if strategy.world_size == 1 else 1
    communicators += strategy.dp_replicate > 1 and strategy.dp_shard > 1
    communicators += strategy.zero.hpz_partition_size > 1
    communicators += sum(getattr(strategy, axis) > 1 for axis in ("sp", "cp", "tp", "pp", "ep"))

    low, middle, high = moved_factors(RESERVED_OVER_PREDICTED, ratios)
    terms = dict(phases[phase])
    terms["allocator_fragmentation"] = round(allocated * (middle - 1))
    terms["runtime_context"] = round(CONTEXT_BYTES.middle)
    if communicators:
        terms["communicators"] = round(communicators * COMMUNICATOR_BYTES.middle)
    return GpuMemory(
        peak_bytes=sum(terms.values()),
        low_bytes=round(allocated * low + CONTEXT_BYTES.low + communicators * COMMUNICATOR_BYTES.low),
        high_bytes=round(allocated * high + CONTEXT_BYTES.high + communicators * COMMUNICATOR_BYTES.high),
        allocated_bytes=allocated,
        capacity_bytes=hardware.gpu_bytes,
        phase=phase,
        terms=terms,
        phases={name: sum(parts.values()) for name, parts in phases.items()},
        calibrated_runs=len(ratios),
    )
