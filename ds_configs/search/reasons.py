"""One sentence for each choice and each rejection, with the numbers that decided."""

from __future__ import annotations

from collections.abc import Sequence

from ..memory.estimate import MemoryEstimate
from ..memory.moments import Terms
from ..memory.rank_parameters import rank_parameters
from ..specs.hardware import HardwareSpec
from ..specs.job import TrainingJob
from ..specs.model import ModelSpec
from ..specs.strategy import Strategy
from ..specs.units import gigabytes
from ..step_time.communication import communication_seconds
from ..step_time.step_cost import StepCost, step_cost

_NAMES = {
    "single": "One process",
    "ddp": "DDP",
    "zero0": "ZeRO-0",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
    "zero3-hpz": "ZeRO-3 with hpZ",
    "fsdp2": "FSDP2",
    "fsdp2-hybrid": "Hybrid FSDP2",
}


def display_name(strategy: Strategy) -> str:
    """Return the layout's name for people, such as `ZeRO-1 + TP 2` or `ZeRO-2 + CPU offload of optimizer`."""
    base, *parts = strategy.label.split("+")
    names = [_NAMES[base]]
    for part in parts:
        axis = part[:2]
        if axis in strategy.axes and part[2:].isdigit():
            names.append(f"{axis.upper()} {part[2:]}")
        else:
            names.append(part.replace("cpu-", "CPU ").replace("nvme-", "NVMe "))
    return " + ".join(names)


def largest_terms(terms: Terms, *, count: int = 4) -> str:
    """Return the largest named terms in GB, such as `optimizer states 12.0, activations 8.1`."""
    ranked = sorted(terms.items(), key=lambda item: -item[1])[:count]
    return ", ".join(f"{name.replace('_', ' ')} {gigabytes(value)}" for name, value in ranked)


def chosen_reason(
    strategy: Strategy,
    memory: MemoryEstimate,
    model: ModelSpec,
    hardware: HardwareSpec,
    job: TrainingJob,
    *,
    skipped: int,
    smaller: Sequence[tuple[Strategy, MemoryEstimate]] = (),
) -> str:
    """Return why this layout was taken; `smaller` holds the preferred ones that do not fit."""
    gpu, cost = memory.gpu, step_cost(strategy, model, hardware, job)
    asked = "the strategy you asked for" if job.strategy != "auto" else _preference(strategy, job, skipped, cost)
    checkpointing = "with" if strategy.gradient_checkpointing else "without"
    return (
        f"{display_name(strategy)} is {asked}: it needs {gigabytes(gpu.peak_bytes)} GB "
        f"({gigabytes(gpu.low_bytes)} to {gigabytes(gpu.high_bytes)}) of {gigabytes(gpu.capacity_bytes)} GB, at most "
        f"in the {gpu.phase} phase{_of_stage(gpu.stage)}: {largest_terms(gpu.terms)}; micro-batch "
        f"{strategy.micro_batch_size} "
        f"{checkpointing} gradient checkpointing{_calibrated(gpu.calibrated_runs, hardware)}."
        + _of_division(strategy, model, job)
        + _of_time(strategy, cost)
        + (_too_large(strategy, smaller) if strategy.axes else "")
    )


_MEANINGS = {
    "data": "gathers and reductions beyond the computation beside them",
    "tensor": "all-reduces of TP",
    "sequence": "all-to-alls of SP",
    "context": "keys and values of CP",
    "expert": "all-to-alls of EP",
    "transfer": "transfers between stages",
    "bubble": "idle stages",
}

_NOTHING_LOST = 5e-4
"""Seconds that are shown as none."""


def lost_time(cost: StepCost) -> str:
    """Return what a layout loses of a step, with its parts, such as `0.36 s (all-to-alls of SP 0.36)`."""
    parts = sorted(((value, name) for name, value in cost.parts.items() if value >= _NOTHING_LOST), reverse=True)
    shown = ", ".join(f"{_MEANINGS[name]} {_seconds(value)}" for value, name in parts)
    return f"{_seconds(cost.lost_seconds)} s" + (f" ({shown})" if shown else "")


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 or value < _NOTHING_LOST else f"{value:.3f}"


def _of_division(strategy: Strategy, model: ModelSpec, job: TrainingJob) -> str:
    """Say what each axis divides."""
    sizes = model.dimensions
    divided = {
        "tp": f"the matrices of each layer ({sizes.num_attention_heads} heads)",
        "pp": f"the {sizes.num_layers} layers, of {strategy.gradient_accumulation_steps} micro-batches in a step",
        "sp": f"sequences of {job.seq_len_tokens:,} tokens",
        "cp": f"sequences of {job.seq_len_tokens:,} tokens",
        "ep": f"the {sizes.num_experts} experts of each layer",
    }
    parts = "; ".join(f"{axis.upper()} {size} divides {divided[axis]}" for axis, size in strategy.axes.items())
    return f" {parts}." if parts else ""


def _of_time(strategy: Strategy, cost: StepCost) -> str:
    """Say what is lost of a step, where that is anything and offload does not outweigh it."""
    if cost.lost_seconds < _NOTHING_LOST or strategy.offload_optimizer != "none":
        return ""
    return (
        f" Of a step of {cost.tokens_per_accelerator:,.0f} tokens for each accelerator "
        f"({_seconds(cost.compute_seconds)} s of computation) it loses {lost_time(cost)}."
    )


def _too_large(strategy: Strategy, smaller: Sequence[tuple[Strategy, MemoryEstimate]]) -> str:
    """Name the next smaller division that does not fit, and the smallest layout without any."""

    def size(other: Strategy) -> int:
        return max(other.axes.values(), default=1)

    same = [pair for pair in smaller if pair[0].axes.keys() == strategy.axes.keys() and size(pair[0]) < size(strategy)]
    same.sort(key=lambda pair: (-size(pair[0]), pair[1].gpu.high_bytes))
    plain = sorted((pair for pair in smaller if not pair[0].axes), key=lambda pair: pair[1].gpu.high_bytes)
    shown = [
        f"{display_name(other)} needs up to {gigabytes(memory.gpu.high_bytes)} GB: {largest_terms(memory.gpu.terms)}"
        for other, memory in same[:1] + plain[:1]
    ]
    return f" Too large: {'; '.join(shown)}." if shown else ""


def _of_stage(stage: int | None) -> str:
    return "" if stage is None else f" of stage {stage}"


def _calibrated(runs: int, hardware: HardwareSpec) -> str:
    if runs == 0:
        return ""
    return f"; interval from {runs} measured run{'s' if runs > 1 else ''} on {hardware.gpu}"


def _preference(strategy: Strategy, job: TrainingJob, skipped: int, cost: StepCost) -> str:
    if strategy.engine == "single":
        return "enough for one accelerator"
    if strategy.offload_optimizer != "none" and job.offload != "auto":
        return "the first layout that fits with the offload you asked for"
    sizes = " with the sizes you asked for" if any((size or 1) > 1 for size in job.axis_sizes.values()) else ""
    if strategy.offload_optimizer != "none":
        return f"the first layout that fits; without offload none does{sizes}"
    if strategy.axes or cost.lost_seconds >= _NOTHING_LOST:
        return f"the layout that loses least of a step among those that fit{sizes}{_of_batch(strategy, job, sizes)}"
    if skipped == 0:
        return "the simplest layout, and none communicates less"
    return "the simplest of the layouts that fit and communicate least"


def _of_batch(strategy: Strategy, job: TrainingJob, sizes: str) -> str:
    """Say that data parallelism alone was illegal, where the batch is too small for it."""
    batch, ranks = job.global_batch_size, strategy.world_size
    if batch is None or sizes or not strategy.axes or batch % ((job.micro_batch_size or 1) * ranks) == 0:
        return ""
    shown = f" in micro-batches of {job.micro_batch_size}" if (job.micro_batch_size or 1) > 1 else ""
    return f"; data parallelism alone cannot divide a global batch of {batch} over {ranks} ranks{shown}"


def rejected_reason(
    strategy: Strategy,
    memory: MemoryEstimate,
    model: ModelSpec,
    hardware: HardwareSpec,
    job: TrainingJob,
    *,
    chosen: Strategy | None,
    chosen_job: TrainingJob | None = None,
) -> str:
    """Return why this layout was not taken: what it lacks, or what it costs more than the chosen one.

    The jobs say where a teacher would live and lives.
    """
    name, gpu, host = display_name(strategy) + _with_teacher(job), memory.gpu, memory.host
    if not gpu.fits:
        return (
            f"{name} needs up to {gigabytes(gpu.high_bytes)} GB of {gigabytes(gpu.capacity_bytes)} GB: "
            f"{largest_terms(gpu.terms)}."
        )
    if host.peak_bytes_per_node > host.capacity_bytes_per_node:
        return (
            f"{name} needs {gigabytes(host.peak_bytes_per_node)} GB of {gigabytes(host.capacity_bytes_per_node)} GB "
            f"host memory on each node: {largest_terms(host.terms)}."
        )
    if host.nvme_bytes_per_node > memory.nvme_capacity_bytes_per_node:
        return (
            f"{name} needs {gigabytes(host.nvme_bytes_per_node)} GB of "
            f"{gigabytes(memory.nvme_capacity_bytes_per_node)} GB NVMe on each node."
        )
    assert chosen is not None, "a layout that fits is only rejected for a better one"
    if chosen_job is not None and chosen_job.teacher_placement != job.teacher_placement:
        return f"{name} fits with {gigabytes(gpu.high_bytes)} GB, but not{_with_teacher(chosen_job)}."
    return f"{name} fits with {gigabytes(gpu.high_bytes)} GB, but {_cost(strategy, chosen, model, hardware, job)}."


def _with_teacher(job: TrainingJob) -> str:
    where = "as a replica" if job.teacher_placement == "replica" else job.teacher_placement
    return "" if job.teacher is None else f" with the teacher {where}"


def _cost(strategy: Strategy, chosen: Strategy, model: ModelSpec, hardware: HardwareSpec, job: TrainingJob) -> str:
    if strategy.offload_optimizer != "none" and chosen.offload_optimizer == "none":
        return "moves states over PCIe, which the chosen layout does not need"
    if strategy.offload_optimizer != chosen.offload_optimizer or strategy.offload_param != chosen.offload_param:
        return "moves more states off the accelerator than the chosen layout"
    if strategy.axes or chosen.axes:
        mine_lost, other_lost = (step_cost(layout, model, hardware, job) for layout in (strategy, chosen))
        return f"loses {lost_time(mine_lost)} of a step, the chosen layout {_seconds(other_lost.lost_seconds)} s"
    parameters = rank_parameters(model, job)
    mine = communication_seconds(strategy, hardware, job, parameters)
    other = communication_seconds(chosen, hardware, job, parameters)
    if mine > other * 1.001:
        factor = f"{mine / other:.2f} times" if other else "more than"
        return f"communicates {factor} what the chosen layout does"
    return "communicates as much as the simpler chosen layout"


def analysis_reason(
    strategy: Strategy,
    memory: MemoryEstimate,
    model: ModelSpec,
    hardware: HardwareSpec,
    job: TrainingJob,
    *,
    chosen: Strategy,
    why_not: str,
) -> str:
    """Return what a layout that cannot run would need and lose, beside the chosen one, and why it cannot run."""
    mine, other = (step_cost(layout, model, hardware, job) for layout in (strategy, chosen))
    return (
        f"{display_name(strategy)} would lose {lost_time(mine)} of a step, the chosen layout "
        f"{_seconds(other.lost_seconds)} s, and fit with {gigabytes(memory.gpu.high_bytes)} GB. Analysis only, it "
        f"cannot run with DeepSpeed 0.19.8: {why_not}."
    )
