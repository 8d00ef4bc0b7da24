"""Rules of pipeline parallelism on plain numbers and names; the planner and the trainer judge by the same ones.

DeepSpeed 0.19.8 checks less and later: `runtime/pipe/engine.py` asserts the ZeRO stage after the model was built,
`runtime/pipe/schedule.py` the micro-batches of DualPipeV when the first step begins.
"""

from __future__ import annotations

from dataclasses import replace

from ..specs.errors import Fault
from ..specs.stages import bubble_fraction
from .candidate import divides, nearest

PIPELINE_MODEL_TYPES = ("gemma2", "gpt2", "llama", "mistral", "phi3", "qwen2", "qwen3")
"""Families whose causal language model can be cut into stages."""
TENSOR_PARALLEL_PIPELINES = ("gemma2", "llama", "mistral", "qwen2", "qwen3")
"""Families whose stages several ranks can hold together; the others fuse or transpose what is cut."""
LARGEST_BUBBLE_PERCENT = 20
"""Idle share of a step above which a remark says so."""


def pipeline_faults(
    *,
    stages: int,
    num_layers: int,
    model_type: str,
    zero_stage: int | None,
    engine: str = "deepspeed",
    offload_optimizer: str = "none",
    offload_param: str = "none",
    tensor_parallel_size: int = 1,
    sequence_parallel_size: int = 1,
    context_parallel_size: int = 1,
    expert_parallel_size: int = 1,
    method: str = "full",
    world_size: int | None = None,
    micro_batches: int | None = None,
    dual_pipe: bool = False,
) -> list[Fault]:
    """Return every rule that a pipeline breaks; none for one stage.

    Args:
        stages: Pipeline ranks, p; DualPipeV cuts the model into 2p parts.
        num_layers: Decoder layers of the model.
        model_type: `model_type` of the model's config.json.
        zero_stage: ZeRO stage, `None` with other engines than DeepSpeed.
        engine: Who shards: `deepspeed`, `fsdp2`, `ddp` or `single`.
        offload_optimizer: `none`, `cpu` or `nvme`.
        offload_param: `none`, `cpu` or `nvme`.
        tensor_parallel_size: Tensor-parallel ranks.
        sequence_parallel_size: Ulysses ranks.
        context_parallel_size: Context-parallel ranks.
        expert_parallel_size: Expert-parallel ranks.
        method: `full`, `lora` or `qlora`.
        world_size: All ranks; `None` when the layout is already known to multiply up to them.
        micro_batches: Micro-batches of one optimizer step and data-parallel rank; `None` when not known yet.
        dual_pipe: Whether DualPipeV schedules them.
    """
    if stages == 1 and not dual_pipe:
        return []
    faults = stage_faults(
        stages=stages,
        num_layers=num_layers,
        world_size=world_size,
        tensor_parallel_size=tensor_parallel_size,
        dual_pipe=dual_pipe,
    )
    faults += _engine_faults(stages, engine, zero_stage, offload_optimizer, offload_param)
    faults += tensor_faults(model_type=model_type, tensor_parallel_size=tensor_parallel_size, dual_pipe=dual_pipe)
    axes = {
        "sp": sequence_parallel_size,
        "cp": context_parallel_size,
        "ep": expert_parallel_size,
    }
    faults += _axis_faults(stages, axes)
    faults += _model_faults(model_type, method)
    if micro_batches is not None:
        faults += micro_batch_faults(stages=stages, micro_batches=micro_batches, dual_pipe=dual_pipe)
    return faults


def stage_faults(
    *,
    stages: int,
    num_layers: int,
    world_size: int | None = None,
    tensor_parallel_size: int = 1,
    dual_pipe: bool = False,
) -> list[Fault]:
    """Return faults of the number of stages: 1 <= p (2p with DualPipeV) <= layers, and p * tp divides the ranks."""
    parts_per_rank = 2 if dual_pipe else 1
    faults = []
    largest = num_layers // parts_per_rank
    legal = [
        count
        for count in range(parts_per_rank, largest + 1)
        if world_size is None or world_size % (count * tensor_parallel_size) == 0
    ]
    if stages < 1:
        faults.append(Fault(where="pp", value=stages, rule="must be at least 1", fix="nearest legal value: 1"))
        return faults
    if stages > largest:
        held = f"2 * pp = {2 * stages} parts" if dual_pipe else f"pp = {stages} stages"
        rule = f"{held} of at least one decoder layer each need as many layers, and the model has {num_layers}"
        faults.append(Fault(where="pp", value=stages, rule=rule, fix=nearest(legal, stages) or "use pp = 1"))
    if dual_pipe and stages == 1:
        faults.append(
            Fault(where="pp", value=1, rule="DualPipeV passes micro-batches between ranks", fix="use 2 or more")
        )
    where = "pp" if tensor_parallel_size == 1 else "pp * tp"
    fault = None if world_size is None else divides(where, stages * tensor_parallel_size, world_size, "the ranks")
    if fault is None:
        return faults
    fix = nearest(legal, stages) or "use pp = 1"
    return [*faults, replace(fault, fix=fix if where == "pp" else f"of pp, {fix}")]


def tensor_faults(*, model_type: str, tensor_parallel_size: int, dual_pipe: bool = False) -> list[Fault]:
    """Return faults of stages that several ranks hold together; heads and widths are tensor parallelism's own rules."""
    if tensor_parallel_size == 1:
        return []
    faults = []
    if model_type in PIPELINE_MODEL_TYPES and model_type not in TENSOR_PARALLEL_PIPELINES:
        rule = f"in a pipeline cuts the layers of {', '.join(TENSOR_PARALLEL_PIPELINES)}, not of {model_type}"
        faults.append(Fault(where="tp", value=tensor_parallel_size, rule=rule, fix="use tp = 1 or pp = 1"))
    if dual_pipe:
        rule = "runs in a pipeline with 1F1B, not with DualPipeV"
        faults.append(Fault(where="tp", value=tensor_parallel_size, rule=rule, fix="use tp = 1 or 1F1B"))
    return faults


def micro_batch_faults(*, stages: int, micro_batches: int, dual_pipe: bool = False) -> list[Fault]:
    """Return faults of the micro-batches of a step: m >= 1, and m >= 2p with DualPipeV (schedule.py:352)."""
    least = 2 * stages if dual_pipe else 1
    if micro_batches >= least:
        return []
    rule = f"DualPipeV needs at least 2 * pp = {least} micro-batches" if dual_pipe else "must be at least 1"
    fix = f"nearest legal value: {least}" + (", or 1F1B" if dual_pipe else "")
    return [Fault(where="gradient_accumulation_steps", value=micro_batches, rule=rule, fix=fix)]


def batch_faults(*, global_batch_size: int, micro_batch_size: int, data_parallel_size: int) -> list[Fault]:
    """Return the fault of a global batch that micro-batches of all data-parallel ranks do not fill exactly."""
    unit = micro_batch_size * data_parallel_size
    if global_batch_size >= unit and global_batch_size % unit == 0:
        return []
    below = global_batch_size // unit * unit
    nearest = ", ".join(str(size) for size in (below, below + unit) if size)
    return [
        Fault(
            where="global_batch_size",
            value=global_batch_size,
            rule=f"must be a multiple of micro_batch_size * dp = {micro_batch_size} * {data_parallel_size} = {unit}",
            fix=f"nearest legal values: {nearest}",
        )
    ]


def pipeline_remarks(*, stages: int, micro_batches: int) -> tuple[str, ...]:
    """Return what is legal but costs time: fewer micro-batches than keep the bubble small."""
    # (p - 1) / (m + p - 1) <= b  <=>  m >= (p - 1) * (1 - b) / b
    enough = -(-(stages - 1) * (100 - LARGEST_BUBBLE_PERCENT) // LARGEST_BUBBLE_PERCENT)
    if micro_batches >= enough:
        return ()
    return (
        f"{stages} stages idle for {bubble_fraction(stages, micro_batches):.0%} of a step of {micro_batches} "
        f"micro-batches, (p - 1) / (m + p - 1); {enough} micro-batches bring it to {LARGEST_BUBBLE_PERCENT}%",
    )


def _engine_faults(
    stages: int, engine: str, zero_stage: int | None, offload_optimizer: str, offload_param: str
) -> list[Fault]:
    if engine != "deepspeed":
        return [Fault(where="pp", value=stages, rule="runs on DeepSpeed", fix="use ZeRO stage 0 or 1")]
    faults = []
    if zero_stage is not None and zero_stage > 1:
        rule = "pipelines run with ZeRO stage 0 or 1: stages 2 and 3 free or move what later micro-batches still need"
        faults.append(Fault(where="zero_optimization.stage", value=zero_stage, rule=rule, fix="nearest legal value: 1"))
    if offload_param != "none":
        rule = "parameters are offloaded in ZeRO-3, which pipelines exclude"
        faults.append(Fault(where="offload_param", value=offload_param, rule=rule, fix="use none, or more stages"))
    if offload_optimizer == "nvme" or (offload_optimizer != "none" and zero_stage == 0):
        rule = "optimizer states of a pipeline are offloaded to the host, with ZeRO-1"
        faults.append(Fault(where="offload_optimizer", value=offload_optimizer, rule=rule, fix="use cpu with ZeRO-1"))
    return faults


def _axis_faults(stages: int, axes: dict[str, int]) -> list[Fault]:
    reasons = {
        "sp": "DeepSpeed's grid has pipe, data and model axes only (deepspeed/runtime/pipe/topology.py)",
        "cp": "it runs on FSDP2, which pipelines exclude",
        "ep": "no family that can be cut into stages has experts",
    }
    return [
        Fault(where=axis, value=size, rule=f"excludes pp = {stages}: {reasons[axis]}", fix=f"use {axis} = 1 or pp = 1")
        for axis, size in axes.items()
        if size > 1
    ]


def _model_faults(model_type: str, method: str) -> list[Fault]:
    faults = []
    if model_type not in PIPELINE_MODEL_TYPES:
        rule = f"pipelines are made of {', '.join(PIPELINE_MODEL_TYPES)}"
        faults.append(Fault(where="model_type", value=model_type, rule=rule, fix="use ZeRO-3 for this model"))
    if method != "full":
        rule = "pipelines train whole models: adapters would leave stages without a trainable parameter to reduce"
        faults.append(Fault(where="method", value=method, rule=rule, fix="use full, or ZeRO with adapters"))
    return faults
