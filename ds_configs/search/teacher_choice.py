"""Placements of a teacher that the search tries, and the reason for the chosen one."""

from __future__ import annotations

from dataclasses import replace

from ..memory.activation_source import ActivationSource
from ..memory.calibration import Calibration
from ..memory.distillation_memory import teacher_gpu_bytes, teacher_host_bytes
from ..memory.estimate import MemoryEstimate, estimate_memory
from ..specs.errors import Fault, UsageError
from ..specs.hardware import HardwareSpec
from ..specs.job import TrainingJob
from ..specs.model import ModelSpec
from ..specs.strategy import Strategy
from ..specs.teacher_placement import AUTOMATIC_PLACEMENTS, TeacherChoice, TeacherCost, TeacherPlacement
from ..specs.units import gigabytes

PLACEMENTS: tuple[TeacherPlacement, ...] = (*AUTOMATIC_PLACEMENTS, "quantized", "cached")

_COSTS: dict[TeacherPlacement, str] = {
    "replica": "communicates nothing",
    "sharded": "gathers its parameters in every micro-batch",
    "offloaded": "copies its parameters over PCIe in every micro-batch",
    "quantized": "answers with 4-bit weights, which changes the targets",
    "cached": "needs a cache of its answers, made before, and knows only the tokens of the data",
}


def jobs_by_placement(job: TrainingJob, hardware: HardwareSpec) -> list[TrainingJob]:
    """Return the job with each placement that may be tried, most preferred first; the job alone without a teacher.

    Raises:
        UsageError: one accelerator has nobody to share a teacher with.
    """
    if job.teacher is None:
        return [job]
    if job.teacher_placement == "sharded" and hardware.world_size == 1:
        rule = "shards over ranks, and there is one"
        raise UsageError(Fault(where="teacher_placement", value="sharded", rule=rule, fix="use replica or offloaded"))
    if job.teacher_placement != "auto":
        return [job]
    return [
        replace(job, teacher_placement=placement)
        for placement in AUTOMATIC_PLACEMENTS
        if placement != "sharded" or hardware.world_size > 1
    ]


def choose_teacher(
    strategy: Strategy,
    memory: MemoryEstimate,
    model: ModelSpec,
    hardware: HardwareSpec,
    job: TrainingJob,
    *,
    asked: bool,
    activations: ActivationSource | None,
    calibration: Calibration | None,
) -> TeacherChoice | None:
    """Return where the teacher of a chosen layout lives and what other places would cost; `None` without one.

    `job` has the placement that was chosen; `asked` says that the user named it.
    """
    if job.teacher is None or job.teacher_placement == "auto":
        return None
    others = [p for p in PLACEMENTS if p != job.teacher_placement and (p != "sharded" or hardware.world_size > 1)]
    costs = []
    for placement in others:
        moved = replace(job, teacher_placement=placement)
        needed = estimate_memory(strategy, model, hardware, moved, activations=activations, calibration=calibration)
        costs.append(_cost(strategy, hardware, moved, placement, needed))
    return TeacherChoice(
        placement=job.teacher_placement,
        reason=_reason(strategy, hardware, job, memory, costs, asked=asked),
        gpu_bytes=teacher_gpu_bytes(strategy, job),
        host_bytes=teacher_host_bytes(strategy, job, hardware.gpus_per_node),
        alternatives=tuple(costs),
    )


def _cost(
    strategy: Strategy, hardware: HardwareSpec, job: TrainingJob, placement: TeacherPlacement, memory: MemoryEstimate
) -> TeacherCost:
    needs = _shortage(memory) or f"fits with up to {gigabytes(memory.gpu.high_bytes)} GB"
    return TeacherCost(
        placement=placement,
        gpu_bytes=teacher_gpu_bytes(strategy, job),
        host_bytes=teacher_host_bytes(strategy, job, hardware.gpus_per_node),
        fits=memory.fits,
        reason=f"{needs}; {_COSTS[placement]}",
    )


def _shortage(memory: MemoryEstimate) -> str:
    gpu, host = memory.gpu, memory.host
    if not gpu.fits:
        return f"would need up to {gigabytes(gpu.high_bytes)} of {gigabytes(gpu.capacity_bytes)} GB"
    if host.peak_bytes_per_node > host.capacity_bytes_per_node:
        used, capacity = gigabytes(host.peak_bytes_per_node), gigabytes(host.capacity_bytes_per_node)
        return f"would need {used} of {capacity} GB host memory on each node"
    return "" if memory.fits else "would need more NVMe than there is"


def _reason(
    strategy: Strategy,
    hardware: HardwareSpec,
    job: TrainingJob,
    memory: MemoryEstimate,
    costs: list[TeacherCost],
    *,
    asked: bool,
) -> str:
    placement = job.teacher_placement
    assert job.teacher is not None and placement != "auto", "the search decided on a placement"
    holds = f"holds up to {gigabytes(teacher_gpu_bytes(strategy, job))} GB on each accelerator"
    host = teacher_host_bytes(strategy, job, hardware.gpus_per_node)
    if placement == "offloaded":
        holds += f" and {gigabytes(host)} GB in the host memory of each node"
    if asked:
        return f"{placement} is the placement you asked for: it {holds} and {_COSTS[placement]}."
    earlier = AUTOMATIC_PLACEMENTS[: AUTOMATIC_PLACEMENTS.index(placement)]
    tried = [f"{cost.placement} {cost.reason.partition(';')[0]}" for cost in costs if cost.placement in earlier]
    if not tried:
        return f"{placement} is the simplest placement, and it fits: it {holds} and {_COSTS[placement]}."
    return f"{placement} is the first placement that fits: it {holds} and {_COSTS[placement]}; {', '.join(tried)}."
