"""The layouts that the search tries: engines and stages with their variants, offload, and axes beyond data parallelism.

Their order decides nothing but ties. No offload comes before offload and CPU before NVMe.
"""

from __future__ import annotations

from dataclasses import replace

from ..memory.buffers import default_zero_options
from ..specs.hardware import HardwareSpec
from ..specs.job import StrategyName, TrainingJob
from ..specs.model import ModelSpec
from ..specs.strategy import OffloadDevice, Strategy
from .axis_levels import axes_to_try, fixes_axes, names_for_axes, with_axes

_STAGES_OF_NAME = {"zero0": 0, "zero1": 1, "zero2": 2, "zero3": 3, "zero3-hpz": 3}
_OFFLOADS: dict[str, tuple[OffloadDevice, OffloadDevice]] = {
    "none": ("none", "none"),
    "cpu": ("cpu", "none"),
    "cpu-all": ("cpu", "cpu"),
    "nvme": ("nvme", "cpu"),
    "nvme-all": ("nvme", "nvme"),
}
_AUTO_NAMES = ("single", "ddp", "zero1", "zero2", "zero3", "zero3-hpz", "fsdp2", "fsdp2-hybrid")


def candidate_levels(model: ModelSpec, hardware: HardwareSpec, job: TrainingJob) -> list[Strategy]:
    """Return the layouts that the job allows, with one sequence per micro-batch.

    A level is a layout without micro-batch and checkpointing, which the search then chooses.
    """
    explicit = job.strategy != "auto"
    names = _names(job)
    levels: list[Strategy] = []
    for offload in _offload_names(job, hardware, explicit=explicit):
        tier = [] if fixes_axes(job) else [_build(name, offload, model, hardware, job) for name in names]
        for axes in axes_to_try(model, hardware, job, offload):
            wanted = _quantizing(names_for_axes(job, axes), job)
            bases = [_build(name, offload, model, hardware, replace(job, strategy=name)) for name in wanted]
            tier += [with_axes(base, axes, hardware) for base in bases if base is not None]
        levels += [_with_quantization(strategy, job) for strategy in tier if strategy is not None]
    return levels


_QUANTIZING = ("zero3", "zero3-hpz")


def _is_quantized(job: TrainingJob) -> bool:
    return job.zero_quantized_weights or job.zero_quantized_gradients


def _quantizing(names: tuple[StrategyName, ...], job: TrainingJob) -> tuple[StrategyName, ...]:
    """Return those of the engines that can quantize, if that is wanted.

    Where none of them can and the user fixed a size, one is returned all the same, so that its rules say why.
    """
    if not _is_quantized(job):
        return names
    able = tuple(name for name in names if name in _QUANTIZING)
    if able or not fixes_axes(job):
        return able
    return ("zero3",) if job.strategy == "auto" else (job.strategy,)


def _names(job: TrainingJob) -> tuple[str, ...]:
    """Return the engines to try; quantized collectives exist in ZeRO-3 alone."""
    if job.strategy != "auto":
        return (job.strategy,)
    return _QUANTIZING if _is_quantized(job) else _AUTO_NAMES


def _with_quantization(strategy: Strategy, job: TrainingJob) -> Strategy:
    if not _is_quantized(job):
        return strategy
    quantized = replace(
        strategy.zero,
        quantized_weights=job.zero_quantized_weights,
        quantized_gradients=job.zero_quantized_gradients,
    )
    return replace(strategy, zero=quantized)


def lean_variant(strategy: Strategy, model: ModelSpec, job: TrainingJob) -> Strategy | None:
    """Return the same layout with small DeepSpeed buffers, or `None` where there are none to shrink."""
    if strategy.engine != "deepspeed" or not strategy.zero_stage:
        return None
    lean = default_zero_options(model, job, stage=strategy.zero_stage, lean=True)
    kept = strategy.zero
    return replace(
        strategy,
        zero=replace(
            lean,
            hpz_partition_size=kept.hpz_partition_size,
            quantized_weights=kept.quantized_weights,
            quantized_gradients=kept.quantized_gradients,
            parameter_buffer_elements=kept.parameter_buffer_elements,
        ),
    )


def _offload_names(job: TrainingJob, hardware: HardwareSpec, *, explicit: bool) -> tuple[str, ...]:
    if job.offload == "nvme":
        return ("nvme", "nvme-all")
    if job.offload != "auto":
        return (job.offload,)
    automatic: tuple[str, ...] = ("none", "cpu", "cpu-all")
    return (*automatic, "nvme", "nvme-all") if hardware.nvme_bytes_per_node else automatic


def _build(name: str, offload: str, model: ModelSpec, hardware: HardwareSpec, job: TrainingJob) -> Strategy | None:
    optimizer_device, parameter_device = _OFFLOADS[offload]
    world = hardware.world_size
    offloads = offload != "none"
    automatic = job.offload == "auto"
    if name in ("single", "ddp"):
        chosen_freely = job.strategy == "auto"
        if (offloads and (automatic or chosen_freely)) or (chosen_freely and (name == "single") != (world == 1)):
            return None
        return Strategy(
            engine="single" if name == "single" else "ddp",
            offload_optimizer=optimizer_device,
            offload_param=parameter_device,
            dp_replicate=world,
        )
    if name.startswith("fsdp2"):
        return _build_fsdp2(name, offload, hardware, job)
    return _build_zero(name, offload, model, hardware, job)


def _build_fsdp2(name: str, offload: str, hardware: HardwareSpec, job: TrainingJob) -> Strategy | None:
    world, automatic = hardware.world_size, job.strategy == "auto"
    if automatic and (world == 1 or offload not in ("none", "cpu-all")):
        return None
    if job.offload == "auto" and offload not in ("none", "cpu-all"):
        return None
    hybrid = name == "fsdp2-hybrid"
    if hybrid and automatic and hardware.nodes == 1:
        return None
    device: OffloadDevice = "none" if offload == "none" else _OFFLOADS[offload][0]
    return Strategy(
        engine="fsdp2",
        offload_optimizer=device,
        offload_param=device,
        dp_replicate=hardware.nodes if hybrid else 1,
        dp_shard=hardware.gpus_per_node if hybrid else world,
    )


def _build_zero(name: str, offload: str, model: ModelSpec, hardware: HardwareSpec, job: TrainingJob) -> Strategy | None:
    stage = _STAGES_OF_NAME[name]
    optimizer_device, parameter_device = _OFFLOADS[offload]
    world, automatic = hardware.world_size, job.strategy == "auto"
    if automatic and world == 1 and (offload == "none" or stage == 1):
        return None
    if (job.offload == "auto" or automatic) and not _offload_applies(stage, offload):
        return None
    if job.offload == "nvme" and stage < 3:
        # One layout is enough to say that NVMe needs stage 3.
        if offload == "nvme-all":
            return None
        parameter_device = "none"
    zero = default_zero_options(model, job, stage=stage)
    if name == "zero3-hpz":
        if automatic and (hardware.nodes == 1 or offload != "none"):
            return None
        zero = replace(zero, hpz_partition_size=hardware.gpus_per_node)
    if parameter_device == "nvme":
        # A swap buffer must hold the largest shard (partitioned_param_swapper.py:357).
        zero = replace(zero, parameter_buffer_elements=-(-model.largest_parameter // world))
    return Strategy(
        engine="deepspeed",
        zero_stage=stage,
        offload_optimizer=optimizer_device,
        offload_param=parameter_device,
        dp_replicate=world if stage == 0 else 1,
        dp_shard=1 if stage == 0 else world,
        zero=zero,
    )


def _offload_applies(stage: int, offload: str) -> bool:
    """Stage 1 keeps full gradients, so offload starts at stage 2; parameters and NVMe need stage 3."""
    smallest_stage = {"none": 0, "cpu": 2}.get(offload, 3)
    return stage >= smallest_stage
