"""Seconds of one optimizer step, every term named: enter here, by `estimate_step_time`.

One micro-batch of a rank costs its layers and head (`micro_batch.py`), what parallel axes exchange inside the layers,
and what data parallelism gathers and reduces beyond the computation beside it (`data_parallel.py`). A pipeline waits
for its slowest stage: `sum of the stages + (m - 1) * slowest` (1F1B, arXiv 2104.04473, section 2.2). The optimizer, the
gathers of its updates, offload and the host's own work come once in a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from ..memory.pipeline_stages import pipeline_stages
from ..specs.hardware import HardwareSpec
from ..specs.job import OPTIMIZERS, TrainingJob
from ..specs.model import ModelSpec, lora_parameter_count
from ..specs.stages import PipelineStage, contiguous_stages
from ..specs.strategy import Strategy
from .constants import GpuConstants, hardware_constants
from .data_parallel import DataTraffic, Held, data_traffic, together
from .exchanges import exchanges, transfer_seconds
from .micro_batch import Batch, Device, Pass, device_of, head_passes, layer_passes, with_host
from .model_work import ModelWork, model_work
from .offload import optimizer_seconds, parameter_copy_seconds
from .software import TRANSFORMERS, Software


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Predicted time of one optimizer step."""

    seconds: float
    """Expected."""
    low_seconds: float
    """Lower end of the interval."""
    high_seconds: float
    """Upper end of the interval."""
    tokens_per_second: float
    """Tokens of the global batch over `seconds`, all ranks together."""
    terms: dict[str, float]
    """What makes up `seconds`, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Setting:
    """What every part of a step depends on."""

    strategy: Strategy
    model: ModelSpec
    hardware: HardwareSpec
    job: TrainingJob
    software: Software
    constants: GpuConstants
    device: Device
    work: ModelWork
    batch: Batch


def estimate_step_time(
    strategy: Strategy,
    model: ModelSpec,
    hardware: HardwareSpec,
    job: TrainingJob,
    *,
    software: Software = TRANSFORMERS,
    constants: GpuConstants | None = None,
) -> StepTime:
    """Return the seconds of one optimizer step of a layout, `micro_batch_size * gradient_accumulation_steps` a rank.

    Raises:
        UsageError: there are fewer layers than pipeline stages.
    """
    constants = constants or hardware_constants(hardware)
    setting = _setting(strategy, model, hardware, job, software, constants)
    stages = _stages(setting)
    # Stages of as many layers cost the same, wherever they lie.
    kinds = {_kind(stage): _stage_terms(setting, stage) for stage in stages}
    costs = {kind: sum(terms.values()) for kind, terms in kinds.items()}
    slowest = max(costs, key=lambda kind: costs[kind])
    micro_batches = strategy.gradient_accumulation_steps
    terms = {name: micro_batches * value for name, value in kinds[slowest].items()}
    if strategy.pp > 1:
        idle = sum(costs[_kind(stage)] for stage in stages) - costs[slowest]
        terms["pipeline_bubble"] = idle / software.virtual_stages
    for name, value in _once(setting, stages[0]).items():
        terms[name] = terms.get(name, 0.0) + value
    terms = {name: value for name, value in terms.items() if value > 0}
    seconds = sum(terms.values())
    tokens = strategy.global_batch_size * job.seq_len_tokens
    return StepTime(
        seconds=seconds,
        low_seconds=seconds / (1 + constants.error),
        high_seconds=seconds * (1 + constants.error),
        tokens_per_second=tokens / seconds,
        terms=terms,
    )


def _setting(
    strategy: Strategy,
    model: ModelSpec,
    hardware: HardwareSpec,
    job: TrainingJob,
    software: Software,
    constants: GpuConstants,
) -> _Setting:
    ranks = strategy.sp * strategy.cp
    return _Setting(
        strategy=strategy,
        model=model,
        hardware=hardware,
        job=job,
        software=software,
        constants=constants,
        device=device_of(hardware, job, software, constants),
        work=model_work(
            model,
            strategy.tp,
            strategy.ep,
            divides_head=strategy.pp == 1,
            vocabulary_parallel=software.vocabulary_parallel,
        ),
        batch=Batch(
            tokens=strategy.micro_batch_size * job.seq_len_tokens / ranks,
            seq_len_tokens=job.seq_len_tokens,
        ),
    )


def _kind(stage: PipelineStage) -> tuple[int, bool, bool]:
    return stage.num_layers, stage.has_embedding, stage.has_head


def _stages(setting: _Setting) -> tuple[PipelineStage, ...]:
    strategy, model, job = setting.strategy, setting.model, setting.job
    if strategy.pp == 1:
        layers = model.dimensions.num_layers
        return (PipelineStage(index=0, first_layer=0, end_layer=layers, has_embedding=True, has_head=True),)
    if setting.software.even_stages:
        layers = model.dimensions.num_layers
        return contiguous_stages([(index + 1) * layers // strategy.pp for index in range(strategy.pp)])
    return pipeline_stages(model, job, strategy.pp, tensor_parallel_size=strategy.tp)


def _stage_terms(setting: _Setting, stage: PipelineStage) -> dict[str, float]:
    strategy, job, work, constants = setting.strategy, setting.job, setting.work, setting.constants
    full, layers = job.method == "full", stage.num_layers
    forward, backward = layer_passes(
        work, setting.batch, setting.device, setting.software, job.compute_bytes, full, job.method == "qlora"
    )
    recomputed = strategy.recomputed_layers(layers)
    head, head_back = Pass(), Pass()
    if stage.has_head:
        chunked = job.loss == "chunked"
        head, head_back = head_passes(
            work, setting.batch.tokens, setting.device, setting.software, chunked, full
        )
    again = recomputed * forward.device
    if setting.software.selective_recomputation:
        again = layers * forward.attention
    terms = {
        "matrix_products": layers * (forward.products + backward.products),
        "attention": layers * (forward.attention + backward.attention),
        "memory_operations": layers * (forward.memory + backward.memory) + _weight_traffic(setting, stage),
        "recomputation": again,
        "head_and_loss": head.device + head_back.device,
    }
    inside, waiting = exchanges(
        strategy,
        work,
        setting.hardware,
        constants,
        tokens=setting.batch.tokens,
        layers=layers,
        recomputed=recomputed,
        with_head=stage.has_head,
        element_bytes=job.compute_bytes,
    )
    hidden_slowdown = 0.0
    if setting.software.overlaps_tensor_parallel and strategy.tp > 1:
        inside["tensor_parallel"], hidden_slowdown = _exposed(setting, inside["tensor_parallel"], terms["matrix_products"])
        waiting = 0.0
    terms |= inside
    device = sum(terms.values())
    kernels = layers * (forward.kernels + backward.kernels) + recomputed * forward.kernels
    kernels += head.kernels + head_back.kernels
    busy = with_host(device, kernels, constants)
    terms["kernel_launches"] = busy - device + setting.software.micro_batch_seconds
    # A deep queue on the device absorbs what hosts differ; where the host is the slower one, everybody waits for it.
    waiting *= max(0.0, 1.0 - device / (kernels * constants.launch_seconds))
    terms["waiting_for_ranks"] = waiting
    if strategy.pp > 1 and not setting.software.overlaps_transfers:
        terms["pipeline_transfers"] = transfer_seconds(
            setting.hardware,
            constants,
            tokens=setting.batch.tokens / (strategy.tp if setting.software.scatters_transfers else 1),
            hidden_size=work.hidden_size,
            element_bytes=job.compute_bytes,
        )
    traffic = _traffic(setting, stage)
    share = (layers * forward.device + head.device) / max(device, 1e-12)
    ahead = share * busy
    terms["parameter_gathers"], slowed = _exposed(setting, traffic.gathers_forward, ahead)
    back, slowed_back = _exposed(setting, traffic.gathers_backward + traffic.reductions_each, busy - ahead)
    terms["parameter_gathers"] += back
    terms["overlap_slowdown"] = hidden_slowdown + slowed + slowed_back
    copied = 2 + (1 if recomputed else 0)
    terms["host_copies"] = copied * parameter_copy_seconds(
        strategy, setting.hardware, job, constants, parameters=_stepped(setting, stage)
    )
    return terms


def _exposed(setting: _Setting, communication: float, computation: float) -> tuple[float, float]:
    """Return what of a communication the computation beside it does not hide, and what it slows that down."""
    if communication <= 0:
        return 0.0, 0.0
    if not setting.software.overlaps_gathers:
        return communication, 0.0
    hidden = min(communication, computation)
    return communication - hidden, setting.constants.overlap_slowdown * hidden


def _held(setting: _Setting, stage: PipelineStage) -> tuple[float, float, float]:
    """Return the dense and expert parameters of a rank's stage that are trained, and the bytes of frozen ones."""
    work, job, model = setting.work, setting.job, setting.model
    outside = float(work.outside_parameters)
    if setting.strategy.pp > 1:
        embedding = float(model.embedding_parameters)
        if setting.software.vocabulary_parallel:
            embedding /= setting.strategy.tp
        outside = embedding * (int(stage.has_embedding) + int(stage.has_head))
    dense = stage.num_layers * (work.layer_parameters - work.expert_parameters) + outside
    experts = stage.num_layers * work.expert_parameters
    if job.method == "full":
        return dense, experts, 0.0
    adapters = _adapters(model, job) / (setting.strategy.tp * setting.strategy.pp)
    width = 0.55 if job.method == "qlora" else job.compute_bytes
    return adapters, 0.0, (dense + experts) * width


@lru_cache(maxsize=64)
def _adapters(model: ModelSpec, job: TrainingJob) -> int:
    return lora_parameter_count(model, rank=job.lora_rank, targets=job.lora_targets)


def _traffic(setting: _Setting, stage: PipelineStage) -> DataTraffic:
    strategy, layers = setting.strategy, float(stage.num_layers)
    dense, experts, frozen = _held(setting, stage)
    ranks = strategy.data_parallel_size * strategy.sp * strategy.cp
    shared = (setting.hardware, setting.job, setting.software, setting.constants)
    if strategy.ep == 1 or not experts:
        held = Held(trainable=dense + experts, frozen_bytes=frozen, layers=layers, ranks=ranks, stride=strategy.tp)
        return data_traffic(strategy, held, *shared)
    parts = (
        Held(trainable=dense, frozen_bytes=frozen, layers=layers, ranks=ranks, stride=strategy.tp),
        Held(
            trainable=experts,
            frozen_bytes=0.0,
            layers=layers,
            ranks=max(1, ranks // strategy.ep),
            stride=strategy.tp * strategy.ep,
        ),
    )
    return together([data_traffic(strategy, part, *shared) for part in parts])


def _stepped(setting: _Setting, stage: PipelineStage) -> float:
    """Return the parameters that the optimizer steps on a rank of a stage."""
    strategy = setting.strategy
    dense, experts, _ = _held(setting, stage)
    if strategy.engine in ("ddp", "single") or strategy.zero_stage == 0:
        return dense + experts
    shards = setting.software.optimizer_ranks or strategy.shard_size
    return dense / shards + experts * strategy.ep / strategy.shard_size


def _weight_traffic(setting: _Setting, stage: PipelineStage) -> float:
    """Return the seconds in which a micro-batch's gradients are added, and autocast casts weights and gradients.

    Added gradients are read twice and written once; where they are reduced at once, they are copied into a bucket
    instead, and only a partition is added. Autocast reads fp32 weights and writes 16-bit ones in the forward
    pass, and the other way round for gradients.
    """
    strategy, job = setting.strategy, setting.job
    dense, experts, frozen = _held(setting, stage)
    trainable = dense + experts
    autocast = strategy.engine in ("ddp", "single") and job.compute_bytes == 2
    each = setting.software.gradient_bytes
    if each is None:
        reduced_at_once = strategy.engine == "fsdp2" or (strategy.zero_stage or 0) >= 2
        each = (2.0 if reduced_at_once else 3.0) * job.compute_bytes
    traffic = (24.0 if autocast else each) * trainable
    return traffic / setting.device.memory_bytes_per_s


def _once(setting: _Setting, stage: PipelineStage) -> dict[str, float]:
    """Return the terms that come once in a step, on the stage that holds most."""
    strategy, software = setting.strategy, setting.software
    traffic = _traffic(setting, stage)
    terms = optimizer_seconds(
        strategy,
        setting.hardware,
        setting.job,
        software,
        setting.constants,
        parameters=_stepped(setting, stage),
    )
    reduction, slowed = traffic.reductions_once, 0.0
    if software.overlaps_reduction and strategy.pp == 1 and _overlaps(strategy):
        stage_terms = _stage_terms(setting, stage)
        busy = sum(stage_terms.get(name, 0.0) for name in _BACKWARD_BESIDE)
        reduction, slowed = _exposed(setting, reduction, busy * 2 / 3)
    terms["gradient_reduction"] = reduction
    terms["overlap_slowdown"] = slowed
    terms["parameter_updates"] = traffic.updates_once
    terms["step_overhead"] = software.step_seconds
    return terms


def _overlaps(strategy: Strategy) -> bool:
    return strategy.engine != "deepspeed" or strategy.zero.overlap_comm


_BACKWARD_BESIDE = (
    "matrix_products",
    "attention",
    "memory_operations",
    "recomputation",
    "head_and_loss",
    "kernel_launches",
    "tensor_parallel",
)
"""Terms of the computation beside which the last micro-batch's gradients are reduced."""
