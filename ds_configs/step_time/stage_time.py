"""Terms of one micro-batch on one stage of a pipeline, or on the whole model without one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..specs.hardware import HardwareSpec
from ..specs.job import TrainingJob
from ..specs.model import ModelSpec, lora_parameter_count
from ..specs.stages import PipelineStage
from ..specs.strategy import Strategy
from .constants import GpuConstants
from .data_parallel import DataTraffic, Held, data_traffic, summed_traffic
from .exchanges import exchanges, transfer_seconds
from .micro_batch import Batch, Device, Pass, device_of, head_passes, layer_passes, with_host
from .model_work import ModelWork, model_work
from .offload import parameter_copy_seconds
from .software import Software


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Facts that every part of a step depends on."""

    strategy: Strategy
    model: ModelSpec
    hardware: HardwareSpec
    job: TrainingJob
    software: Software
    constants: GpuConstants
    device: Device
    work: ModelWork
    batch: Batch


def setting_of(
    strategy: Strategy,
    model: ModelSpec,
    hardware: HardwareSpec,
    job: TrainingJob,
    software: Software,
    constants: GpuConstants,
) -> Setting:
    """Return the setting of a step, with the rank's part of the model."""
    ranks = strategy.sp * strategy.cp
    return Setting(
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


def stage_terms(setting: Setting, stage: PipelineStage) -> dict[str, float]:
    """Return the seconds of one micro-batch by term; communication counts as far as computation does not hide it."""
    strategy, job, software = setting.strategy, setting.job, setting.software
    computed = _computation(setting, stage)
    terms, ahead = computed.terms, computed.ahead
    recomputed = strategy.recomputed_layers(stage.num_layers)
    inside, waiting = exchanges(
        strategy,
        setting.work,
        setting.hardware,
        setting.constants,
        tokens=setting.batch.tokens,
        layers=stage.num_layers,
        recomputed=recomputed,
        with_head=stage.has_head,
        element_bytes=job.compute_bytes,
    )
    slowed = 0.0
    if software.overlaps_tensor_parallel and strategy.tp > 1:
        inside["tensor_parallel"], slowed = exposed(setting, inside["tensor_parallel"], terms["matrix_products"])
        waiting = 0.0
    terms |= inside
    device = sum(terms.values())
    busy = computed.with_host(device, setting.constants)
    terms["kernel_launches"] = busy - device + software.micro_batch_seconds
    terms["waiting_for_ranks"] = waiting
    if strategy.pp > 1 and not software.overlaps_transfers:
        terms["pipeline_transfers"] = transfer_seconds(
            setting.hardware,
            setting.constants,
            tokens=setting.batch.tokens / (strategy.tp if software.scatters_transfers else 1),
            hidden_size=setting.work.hidden_size,
            element_bytes=job.compute_bytes,
        )
    ahead *= busy / device if device else 1.0
    traffic = stage_traffic(setting, stage)
    first, slowed_first = exposed(setting, traffic.gathers_forward, ahead)
    behind = traffic.gathers_backward + (traffic.reductions_each if overlaps_reductions(setting) else 0.0)
    second, slowed_second = exposed(setting, behind, busy - ahead)
    alone = 0.0 if overlaps_reductions(setting) else traffic.reductions_each
    terms["parameter_gathers"] = first + second + alone
    terms["overlap_slowdown"] = slowed + slowed_first + slowed_second
    copies = 2 + (1 if recomputed else 0)
    frozen = _held(setting, stage)[2] / strategy.shard_size
    terms["host_copies"] = copies * parameter_copy_seconds(
        strategy,
        setting.hardware,
        setting.constants,
        size_bytes=stepped_parameters(setting, stage) * job.compute_bytes + frozen,
    )
    return terms


@dataclass(frozen=True, kw_only=True, slots=True)
class _Computation:
    """One micro-batch of a stage before communication, in seconds."""

    terms: dict[str, float]
    """What the device computes, by term."""
    ahead: float
    """What of it is the forward pass."""
    head_products: float
    """The products of the head, both passes."""
    layers_host: float
    """What the host takes to launch the layers' kernels and to run their hooks."""
    head_host: float
    """What the host takes to launch kernels around the head."""

    def with_host(self, device: float, constants: GpuConstants) -> float:
        """Return the seconds of the device, with the exchanges inside the layers, where it waits for the host.

        The head's products are few and long: they do not make up for what the host cannot launch fast enough elsewhere.
        """
        head = self.terms["head_and_loss"]
        around = with_host(head - self.head_products, self.head_host, constants)
        return with_host(device - head, self.layers_host, constants) + self.head_products + around


def _computation(setting: Setting, stage: PipelineStage) -> _Computation:
    """Return what the device computes for one micro-batch, and what the host takes for it."""
    job, layers, software = setting.job, stage.num_layers, setting.software
    full = job.method == "full"
    forward, backward = layer_passes(
        setting.work, setting.batch, setting.device, software, job.compute_bytes, full, job.method == "qlora"
    )
    head, head_back = Pass(), Pass()
    if stage.has_head:
        chunked = job.loss == "chunked"
        head, head_back = head_passes(setting.work, setting.batch.tokens, setting.device, software, chunked, full)
    recomputed = setting.strategy.recomputed_layers(layers)
    again = layers * forward.attention if software.selective_recomputation else recomputed * forward.device
    if setting.strategy.keeps_products:
        again = recomputed * forward.memory
    terms = {
        "matrix_products": layers * (forward.products + backward.products),
        "attention": layers * (forward.attention + backward.attention),
        "memory_operations": layers * (forward.memory + backward.memory) + _weight_traffic(setting, stage),
        "recomputation": again,
        "head_and_loss": head.device + head_back.device,
    }
    kernels = layers * (forward.kernels + backward.kernels) + recomputed * forward.kernels
    host = kernels * setting.constants.launch_seconds
    if setting.strategy.zero_stage == 3:
        host += (2 * layers + recomputed) * setting.constants.zero3_hook_seconds
    if setting.strategy.keeps_products:
        host += recomputed * setting.constants.kept_products_seconds
    ahead = layers * forward.device + head.device
    if job.teacher is not None and job.teacher_placement != "cached" and stage.has_head:
        terms["teacher_forward"] = _teacher_seconds(setting, job.teacher)
        ahead += terms["teacher_forward"]
    return _Computation(
        terms=terms,
        ahead=ahead,
        head_products=head.products + head_back.products,
        layers_host=host,
        head_host=(head.kernels + head_back.kernels) * setting.constants.launch_seconds,
    )


def _teacher_seconds(setting: Setting, teacher: ModelSpec) -> float:
    """Return the forward pass of a teacher, with the copies of its weights where it lives in host memory."""
    job, software = setting.job, setting.software
    work = model_work(teacher)
    quantized = job.teacher_placement == "quantized"
    batch = setting.batch
    forward, _ = layer_passes(work, batch, setting.device, software, job.compute_bytes, False, quantized)
    head, _ = head_passes(work, batch.tokens, setting.device, software, False, False)
    seconds = work.num_layers * forward.device + head.device
    if job.teacher_placement == "offloaded":
        seconds += teacher.parameter_count * job.compute_bytes / setting.constants.host_link_bytes_per_s
    return seconds


def overlaps_reductions(setting: Setting) -> bool:
    """Whether gradients are reduced beside the backward pass."""
    strategy = setting.strategy
    return setting.software.overlaps_reduction and (strategy.engine != "deepspeed" or strategy.zero.overlap_comm)


def exposed(setting: Setting, communication: float, computation: float) -> tuple[float, float]:
    """Return what of a communication the computation beside it does not hide, and what it slows that down."""
    if communication <= 0:
        return 0.0, 0.0
    if not setting.software.overlaps_gathers:
        return communication, 0.0
    hidden = min(communication, computation)
    return communication - hidden, setting.constants.overlap_slowdown * hidden


def _held(setting: Setting, stage: PipelineStage) -> tuple[float, float, float]:
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


def stage_traffic(setting: Setting, stage: PipelineStage) -> DataTraffic:
    """Return the collectives of data parallelism for what a rank holds of a stage."""
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
    return summed_traffic([data_traffic(strategy, part, *shared) for part in parts])


def stepped_parameters(setting: Setting, stage: PipelineStage) -> float:
    """Return the parameters that the optimizer steps on a rank of a stage."""
    strategy = setting.strategy
    dense, experts, _ = _held(setting, stage)
    if strategy.engine in ("ddp", "single") or strategy.zero_stage == 0:
        return dense + experts
    shards = setting.software.optimizer_ranks or strategy.shard_size
    return dense / shards + experts * strategy.ep / strategy.shard_size


def _weight_traffic(setting: Setting, stage: PipelineStage) -> float:
    """Return the seconds in which a micro-batch's gradients are added, and autocast casts weights and gradients.

    Added gradients are read twice and written once; where they are reduced at once, they are copied into a bucket
    instead, and only a partition is added. Autocast reads fp32 weights and writes 16-bit ones in the forward
    pass, and the other way round for gradients.
    """
    strategy, job = setting.strategy, setting.job
    dense, experts, _ = _held(setting, stage)
    trainable = dense + experts
    autocast = strategy.engine in ("ddp", "single") and job.compute_bytes == 2
    each = setting.software.gradient_bytes
    if each is None:
        reduced_at_once = strategy.engine == "fsdp2" or (strategy.zero_stage or 0) >= 2
        each = (2.0 if reduced_at_once else 3.0) * job.compute_bytes
    traffic = (24.0 if autocast else each) * trainable
    return traffic / setting.device.memory_bytes_per_s
