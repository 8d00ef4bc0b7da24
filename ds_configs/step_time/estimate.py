"""`estimate_step_time`: seconds of a step under a layout, term by term."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil
from typing import Literal

from ..memory.activations import has_fused_loss, mlp_tiles
from ..memory.estimate import offloaded_checkpoints
from ..memory.model_states import Gathered, is_stepped_by_muon, reduced_buckets, zero3_gathers
from ..memory.rank_parameters import NF4_BYTES, engine_parameters, expert_parallel_share, pipeline_stages
from ..specs.hardware import HardwareSpec
from ..specs.job import TrainingJob, without_kernels
from ..specs.layout import Layout, PipelineStage, ZeroOptions, contiguous_stages
from ..specs.model import ModelSpec, ParameterShape, adapters, lora_parameter_count, targeted_linears
from ..specs.optimizers import OPTIMIZERS
from ..specs.second_models import SecondModel
from . import rates as collectives
from .model_work import (
    Batch,
    Device,
    ModelWork,
    Pass,
    device_of,
    head_passes,
    layer_passes,
    model_work,
    product_seconds,
    with_host,
)
from .rates import (
    GpuConstants,
    Software,
    exchange_seconds,
    gather_seconds,
    group_of,
    hardware_constants,
    reduction_seconds,
    software_of,
)

_DDP_BUCKET_BYTES = 25 * 2**20
"""Default bucket of `DistributedDataParallel` (`bucket_cap_mb=25`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataTraffic:
    """Seconds of data-parallel collectives of a rank, without overlap."""

    gathers_forward: float = 0.0
    gathers_backward: float = 0.0
    reductions_each: float = 0.0
    """Reductions of gradients in each micro-batch."""
    reductions_once: float = 0.0
    """Reductions of gradients after the last micro-batch."""
    updates_once: float = 0.0
    """All-gathers of updated parameters after the optimizer step, without overlap."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calls:
    """Collectives in which FSDP2 or ZeRO-3 gathers parameters and reduces their gradients in a micro-batch."""

    forward: Gathered
    backward: Gathered
    reductions: float
    gradients: float = 0.0
    """Tensors whose gradients are reduced."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """Parameters of a group of ranks, before sharding."""

    trainable: float
    """Elements with gradients."""
    frozen_bytes: float
    ranks: int
    """Ranks over which they are replicated or sharded."""
    stride: int
    """Distance between these ranks."""
    calls: Calls
    """Collectives of a micro-batch, if FSDP2 or ZeRO-3 shards them."""


def data_traffic(
    strategy: Layout, held: Held, hardware: HardwareSpec, job: TrainingJob, software: Software, constants: GpuConstants
) -> DataTraffic:
    """Return the collectives of one group of parameters."""
    if held.ranks == 1:
        return DataTraffic()
    width, zero = job.compute_bytes, strategy.zero
    reduces_fp32 = strategy.engine in ("single", "ddp") or strategy.sp > 1
    reduced_width = software.reduction_bytes or (4 if reduces_fp32 else job.compute_bytes)
    group = group_of(hardware, constants, ranks=held.ranks, stride=held.stride)
    gradients = held.trainable * reduced_width
    if strategy.engine == "fsdp2" or strategy.zero_stage == 3:
        shard = max(1, held.ranks // strategy.dp_replicate) if strategy.engine == "fsdp2" else held.ranks
        group = group_of(hardware, constants, ranks=shard, stride=held.stride)
        weights = held.trainable * (1 if zero.quantized_weights else width) + held.frozen_bytes
        again = group
        if zero.hpz_partition_size > 1:
            again = group_of(hardware, constants, ranks=zero.hpz_partition_size, stride=held.stride)
        forward, backward = (
            gather_seconds(among, weights * gathered.share, calls=gathered.calls)
            for among, gathered in zip((group, again), (held.calls.forward, held.calls.backward), strict=True)
        )
        if zero.quantized_gradients:
            gradients = held.trainable * 0.5
        reduction = gather_seconds(group, gradients, calls=held.calls.reductions if held.trainable else 0)
        if strategy.engine == "fsdp2" and strategy.dp_replicate > 1:
            replicas = group_of(hardware, constants, ranks=strategy.dp_replicate, stride=shard * held.stride)
            reduction += reduction_seconds(replicas, gradients / shard, calls=held.calls.reductions)
        return DataTraffic(gathers_forward=forward, gathers_backward=backward, reductions_each=reduction)
    if strategy.engine in ("ddp", "single"):
        calls = ceil(gradients / _DDP_BUCKET_BYTES)
        return DataTraffic(reductions_once=reduction_seconds(group, gradients, calls=calls))
    calls = ceil(held.trainable / max(1, zero.reduce_bucket_size))
    reduction = reduction_seconds(group, gradients, calls=calls)
    if not strategy.zero_stage:
        return DataTraffic(reductions_once=reduction)
    owners = min(software.optimizer_ranks or held.ranks, held.ranks)
    holders = group_of(hardware, constants, ranks=owners, stride=held.stride)
    # Reducing each slice to its owner costs half of an all-reduce. States shared by a few ranks need the sum on all.
    if software.reduces_to_owners and owners == held.ranks:
        reduction = gather_seconds(group, gradients, calls=0) + reduction_seconds(group, 1.0, calls=calls)
    update = gather_seconds(holders, held.trainable * width, calls=ceil(held.trainable / software.update_bucket))
    if strategy.zero_stage == 2:
        return DataTraffic(reductions_each=reduction, updates_once=update)
    return DataTraffic(reductions_once=reduction, updates_once=update)


def summed_traffic(parts: list[DataTraffic]) -> DataTraffic:
    """Return the collectives of all groups of parameters, one after the other."""
    return DataTraffic(
        gathers_forward=sum(part.gathers_forward for part in parts),
        gathers_backward=sum(part.gathers_backward for part in parts),
        reductions_each=sum(part.reductions_each for part in parts),
        reductions_once=sum(part.reductions_once for part in parts),
        updates_once=sum(part.updates_once for part in parts),
    )


def exchanges(
    strategy: Layout,
    work: ModelWork,
    hardware: HardwareSpec,
    constants: GpuConstants,
    *,
    tokens: float,
    layers: float,
    recomputed: float,
    with_head: bool,
    element_bytes: int,
) -> tuple[dict[str, float], float]:
    """Return the seconds of the collectives of each axis, by term, and the seconds that ranks wait for each other."""
    terms: dict[str, float] = {}
    waiting = 0.0
    hidden = tokens * work.hidden_size * element_bytes
    if strategy.tp > 1:
        group = group_of(hardware, constants, ranks=strategy.tp)
        # Two all-reduces forward and two backward (Megatron-LM, arXiv 1909.08053, section 3).
        calls = 4 * layers + 2 * recomputed
        terms["tensor_parallel"] = reduction_seconds(group, calls * hidden, calls=calls)
        if with_head and work.head_rows:
            terms["tensor_parallel"] += reduction_seconds(group, hidden)
        if with_head and work.gathered_vocabulary:
            logits = tokens * work.gathered_vocabulary * element_bytes
            terms["tensor_parallel"] += gather_seconds(group, logits, calls=1)
        waiting += calls * group.waiting_seconds
    if strategy.sp > 1:
        group = group_of(hardware, constants, ranks=strategy.sp)
        # All-to-alls of q, k, v and the output, forward and backward (Ulysses, arXiv 2309.14509, section 3.2). Fewer
        # key/value heads than ranks are repeated (deepspeed/runtime/sequence_parallel/ulysses_sp.py:147).
        repeated = max(1, strategy.sp // work.key_value_heads)
        width = 2 * work.whole_query_size + 2 * work.whole_key_value_size * repeated
        passes = 2 * layers + recomputed
        terms["sequence_parallel"] = exchange_seconds(group, passes * tokens * width * element_bytes, calls=4 * passes)
        waiting += 4 * passes * group.waiting_seconds
    if strategy.cp > 1:
        group = group_of(hardware, constants, ranks=strategy.cp)
        volume = collectives.context_parallel_bytes(
            cp=strategy.cp,
            tokens=round(tokens * strategy.cp),
            key_value_size=work.whole_key_value_size,
            layers=1,
            element_bytes=element_bytes,
        )
        # Three passes of keys and values: gathered forward, passed around and reduced backward.
        passes = layers + recomputed / 3
        calls = 3 * passes
        terms["context_parallel"] = passes * volume / group.bytes_per_s + gather_seconds(group, 1.0, calls=calls)
        waiting += calls * group.waiting_seconds
    if strategy.ep > 1:
        group = group_of(hardware, constants, ranks=strategy.ep, stride=strategy.tp)
        # Dispatch and combine, forward and backward (GShard, arXiv 2006.16668).
        calls = 4 * layers + 2 * recomputed
        terms["expert_parallel"] = exchange_seconds(group, calls * hidden * work.experts_per_token, calls=calls)
        waiting += calls * group.waiting_seconds
    return terms, waiting


def transfer_seconds(
    hardware: HardwareSpec, constants: GpuConstants, *, tokens: float, hidden_size: int, element_bytes: int
) -> float:
    """Return the seconds in which a stage sends one micro-batch: hidden states forward, their gradients backward.

    The slowest boundary limits the pipeline; with several nodes it is between two nodes. Each tensor-parallel rank
    sends the complete tensor over its own network adapter.
    """
    volume = collectives.pipeline_bytes(tokens=int(tokens), hidden_size=hidden_size, element_bytes=element_bytes)
    if hardware.nodes == 1:
        return volume / (hardware.link_bytes_per_s * constants.link_efficiency) + 2 * constants.link_latency_seconds
    rate = hardware.network_bytes_per_s * constants.network_efficiency
    return volume / rate + 2 * constants.network_latency_seconds


HOST_MEMORY_BYTES_PER_S = 20e9
"""Assumed bandwidth of host memory for CPU Adam of one rank: 0.4 of two DDR4-3200 channels (51 GB/s)."""

NODE_MEMORY_BYTES_PER_S = 55e9
"""Bandwidth of host memory for CPU Adam of all ranks of a node, which share it: 73 billion parameters on four nodes of
eight A100 step in 10 s, 0.2 s without offload (https://github.com/deepspeedai/DeepSpeed/issues/6834). The ZeRO-Offload
paper has twice that for its best case, one process with all cores (arXiv 2101.06840)."""

NVME_BYTES_PER_S = 6e9
"""Assumed read and write bandwidth of a node's NVMe: a pair of PCIe 4 drives."""

HOST_ADAM_BYTES = 30
"""Memory traffic of CPU Adam per parameter: reads gradient, weight and two moments, writes the latter three and the
16-bit weight (deepspeed/ops/csrc/adam/cpu_adam_impl.cpp)."""

# Two moments in fp32, which `Software.optimizer_bytes` includes.
_ADAM_STATE_BYTES = 8


def optimizer_seconds(
    strategy: Layout,
    hardware: HardwareSpec,
    job: TrainingJob,
    software: Software,
    constants: GpuConstants,
    *,
    parameters: float,
) -> dict[str, float]:
    """Return the seconds of the optimizer step for `parameters` per rank, by term.

    On the accelerator the step is limited by memory bandwidth, so smaller states are faster. With offload, gradients
    are copied during the backward pass.
    """
    states = OPTIMIZERS[job.optimizer].state_bytes_per_parameter
    if strategy.offload_optimizer == "none":
        traffic = software.optimizer_bytes + 2 * (states - _ADAM_STATE_BYTES)
        return {"optimizer": parameters * traffic / (hardware.memory_bytes_per_s * constants.memory_efficiency)}
    ranks = min(strategy.world_size, hardware.gpus_per_node)
    rate = min(HOST_MEMORY_BYTES_PER_S, NODE_MEMORY_BYTES_PER_S / ranks)
    host = parameters * HOST_ADAM_BYTES / rate
    copies = 2 * parameters * job.compute_bytes / constants.host_link_bytes_per_s
    terms = {"host_optimizer": host, "host_copies": copies}
    if strategy.offload_optimizer == "nvme":
        # fp32 weights, moments and gradients are read and written.
        terms["nvme"] = 2 * parameters * (8 + states) / (NVME_BYTES_PER_S / ranks)
    return terms


def parameter_copy_seconds(
    strategy: Layout, hardware: HardwareSpec, constants: GpuConstants, *, size_bytes: float
) -> float:
    """Return the seconds in which a rank copies its offloaded parameters, including frozen ones, for one pass."""
    if strategy.offload_param == "none":
        return 0.0
    seconds = size_bytes / constants.host_link_bytes_per_s
    if strategy.offload_param == "nvme":
        ranks = min(strategy.world_size, hardware.gpus_per_node)
        seconds = max(seconds, size_bytes / (NVME_BYTES_PER_S / ranks))
    return seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Inputs of every part of a step."""

    strategy: Layout
    model: ModelSpec
    hardware: HardwareSpec
    job: TrainingJob
    software: Software
    constants: GpuConstants
    device: Device
    work: ModelWork
    batch: Batch


def setting_of(
    strategy: Layout,
    model: ModelSpec,
    hardware: HardwareSpec,
    job: TrainingJob,
    software: Software,
    constants: GpuConstants,
) -> Setting:
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
        batch=Batch(tokens=strategy.micro_batch_size * job.seq_len_tokens / ranks, seq_len_tokens=job.seq_len_tokens),
    )


def stage_terms(
    setting: Setting, stage: PipelineStage, held: tuple[float, float, float], traffic: DataTraffic
) -> dict[str, float]:
    """Return the seconds of one micro-batch by term, with only the communication that computation does not hide."""
    strategy, job, software = setting.strategy, setting.job, setting.software
    computed = _computation(setting, stage, held)
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
    if strategy.tp > 1:
        overlapped = software.overlapped_tensor_parallel
        shared = overlapped * inside["tensor_parallel"]
        rest, slowed = exposed(setting, shared, overlapped * terms["matrix_products"])
        inside["tensor_parallel"] += rest - shared
        waiting *= 1 - overlapped
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
    first, slowed_first = exposed(setting, traffic.gathers_forward, ahead)
    behind = traffic.gathers_backward + (traffic.reductions_each if overlaps_reductions(setting) else 0.0)
    second, slowed_second = exposed(setting, behind, busy - ahead)
    alone = 0.0 if overlaps_reductions(setting) else traffic.reductions_each
    terms["parameter_gathers"] = first + second + alone
    terms["overlap_slowdown"] = slowed + slowed_first + slowed_second
    terms["checkpoint_copies"] = _checkpoint_copies(setting, stage, ahead, busy - ahead)
    copies = 2 + (1 if recomputed else 0)
    terms["host_copies"] = copies * parameter_copy_seconds(
        strategy,
        setting.hardware,
        setting.constants,
        size_bytes=stepped_parameters(setting, held) * job.compute_bytes + held[2] / strategy.shard_size,
    )
    return terms


@dataclass(frozen=True, kw_only=True, slots=True)
class _Computation:
    """One micro-batch of a stage before communication, in seconds."""

    terms: dict[str, float]
    """Device time by term."""
    ahead: float
    """Device time of the forward pass."""
    head_products: float
    """Matrix products of the head in both passes."""
    layers_host: float
    """Host time to launch the layers' kernels and run their hooks."""
    head_host: float
    """Host time to launch kernels of head and loss."""

    def with_host(self, device: float, constants: GpuConstants) -> float:
        """Return the device time, including exchanges inside the layers and waiting for the host.

        The head's products are few and long, so they do not hide slow launches elsewhere.
        """
        head = self.terms["head_and_loss"]
        around = with_host(head - self.head_products, self.head_host, constants)
        return with_host(device - head, self.layers_host, constants) + self.head_products + around


def _computation(setting: Setting, stage: PipelineStage, held: tuple[float, float, float]) -> _Computation:
    job, layers, software = setting.job, stage.num_layers, setting.software
    full = job.method == "full"
    forward, backward = layer_passes(
        setting.work, setting.batch, setting.device, software, job.compute_bytes, full, job.method == "qlora"
    )
    if not full:
        forward, backward = (
            replace(one, memory=one.memory + more.memory, kernels=one.kernels + more.kernels)
            for one, more in zip((forward, backward), _adapter_passes(setting), strict=True)
        )
    if setting.strategy.cp > 1:
        merged, added = _ring_seconds(setting)
        forward = replace(forward, attention=forward.attention + merged)
        backward = replace(backward, attention=backward.attention + added)
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
        "memory_operations": layers * (forward.memory + backward.memory) + _weight_traffic(setting, held),
        "recomputation": again,
        "head_and_loss": head.device + head_back.device,
    }
    kernels = layers * (forward.kernels + backward.kernels) + recomputed * forward.kernels
    host = kernels * setting.constants.launch_seconds
    if setting.strategy.zero_stage == 3:
        host += _hook_seconds(setting, stage)
    if setting.strategy.keeps_products:
        host += recomputed * setting.constants.kept_products_seconds
    if setting.strategy.tiled_mlp:
        terms["mlp_recomputation"] = layers * _mlp_seconds(setting)
    if job.loss == "chunked" and not has_fused_loss(
        setting.model, setting.strategy, job, gpu=setting.hardware.gpu != "CPU"
    ):
        # Tiles compute the logits again in the backward pass.
        terms["head_and_loss"] += head.device
    ahead = layers * forward.device + head.device
    for second in job.second_models if stage.has_head else ():
        if second.planned_placement != "cached":
            seconds = _second_model_seconds(setting, second)
            terms[f"{second.role}_forward"] = seconds
            ahead += seconds
    return _Computation(
        terms=terms,
        ahead=ahead,
        head_products=head.products + head_back.products,
        layers_host=host,
        head_host=(head.kernels + head_back.kernels) * setting.constants.launch_seconds,
    )


def _second_model_seconds(setting: Setting, second: SecondModel) -> float:
    """Return the seconds of a second model's forward pass, and of copying its weights from the host."""
    work, element = model_work(second.spec), setting.job.compute_bytes
    quantized = second.planned_placement == "quantized"
    layer, _ = layer_passes(work, setting.batch, setting.device, setting.software, element, False, quantized)
    head, _ = head_passes(work, setting.batch.tokens, setting.device, setting.software, False, False)
    seconds = work.num_layers * layer.device + head.device
    if second.planned_placement == "offloaded":
        seconds += second.spec.parameter_count * element / setting.constants.host_link_bytes_per_s
    return seconds


def _mlp_seconds(setting: Setting) -> float:
    """Return the seconds that a layer's tiled MLP adds: each tile again before its backward pass, and its gradients.

    Each tile's weight gradients are added to those of earlier tiles: two reads and a write.
    """
    model, batch, device, job = setting.model, setting.batch, setting.device, setting.job
    tiles = mlp_tiles(model, ceil(setting.job.seq_len_tokens / (setting.strategy.sp * setting.strategy.cp)))
    layers, routed = max(1, model.dimensions.num_layers), model.dimensions.experts_per_token
    products = weights = 0.0
    for parameter in model.parameters:
        if not parameter.in_layer or parameter.group != "mlp" or len(parameter.shape) < 2:
            continue
        *experts, out, within = parameter.shape
        count = parameter.count / layers * (experts[0] if experts else 1)
        tokens = batch.tokens * (routed / experts[0] if experts else 1) / tiles
        products += tiles * count * product_seconds(device, tokens, out, within)
        weights += count * out * within
    gradients = 3 * job.compute_bytes * weights * (tiles - 1) if job.method == "full" else 0.0
    inner = setting.software.inner_bytes_forward * batch.tokens * setting.work.inner_size * job.compute_bytes / 2
    return products + (gradients + inner) / device.memory_bytes_per_s


def _checkpoint_copies(setting: Setting, stage: PipelineStage, ahead: float, behind: float) -> float:
    """Return the seconds in which layer inputs are copied to the host and back that these layers do not hide.

    `ahead` and `behind` are the seconds of all layers in each pass. Copy engines do not slow down computation.
    """
    strategy, layers = setting.strategy, stage.num_layers
    count = offloaded_checkpoints(strategy, layers)
    width = 4 if strategy.engine in ("single", "ddp") else setting.job.compute_bytes
    size = count * setting.batch.tokens * setting.work.hidden_size * width
    seconds, share = size / setting.constants.host_link_bytes_per_s, count / max(1, layers)
    return max(0.0, seconds - share * ahead) + max(0.0, seconds - share * behind)


def _ring_seconds(setting: Setting) -> tuple[float, float]:
    """Return the seconds in which context parallelism joins the results of a layer's ring steps in fp32, in each pass.

    A step converts its output to fp32 (6 bytes per element), and three operations blend it with that of earlier ones
    (32). In the backward pass a step adds its gradients (10), and copies those of keys and values to send them (8)
    (torch 2.13.0, `_context_parallel/_attention.py`: `_SDPAMerger`, `_templated_ring_attention_backward`).
    """
    steps, work = setting.strategy.cp, setting.work
    rate = setting.device.memory_bytes_per_s / setting.batch.tokens
    output = 38 * (steps - 1) * work.query_size
    gradients = steps * (10 * work.query_size + 18 * 2 * work.key_value_size)
    return output / rate, gradients / rate


def _hook_seconds(setting: Setting, stage: PipelineStage) -> float:
    """Return the host time of ZeRO-3's hooks in a micro-batch."""
    constants, seconds = setting.constants, 0.0
    parts: tuple[_Parameters, ...] = ("all",) if setting.strategy.ep == 1 else ("dense", "experts")
    for calls in (_sharded_calls(setting, stage, part) for part in parts):
        for gathered in (calls.forward, calls.backward):
            seconds += gathered.modules * constants.zero3_module_seconds
            seconds += gathered.tensors * constants.zero3_gather_seconds
        seconds += calls.gradients * constants.zero3_gradient_seconds
        seconds += calls.reductions * constants.zero3_reduction_seconds
    return seconds


def overlaps_reductions(setting: Setting) -> bool:
    strategy = setting.strategy
    return setting.software.overlaps_reduction and (strategy.engine != "deepspeed" or strategy.zero.overlap_comm)


def exposed(setting: Setting, communication: float, computation: float) -> tuple[float, float]:
    """Return the communication that concurrent computation does not hide, and the slowdown of that computation."""
    if communication <= 0:
        return 0.0, 0.0
    if not setting.software.overlaps_gathers:
        return communication, 0.0
    hidden = min(communication, computation)
    return communication - hidden, setting.constants.overlap_slowdown * hidden


def _held(setting: Setting, stage: PipelineStage) -> tuple[float, float, float]:
    """Return the trainable dense and expert parameters of a rank's stage, and the bytes of frozen ones."""
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
    width = NF4_BYTES if job.method == "qlora" else job.compute_bytes
    return adapters, 0.0, (dense + experts) * width


@lru_cache(maxsize=64)
def _adapters(model: ModelSpec, job: TrainingJob) -> int:
    return lora_parameter_count(model, rank=job.lora_rank, targets=job.lora_targets)


def stage_traffic(setting: Setting, stage: PipelineStage, held: tuple[float, float, float]) -> DataTraffic:
    strategy = setting.strategy
    dense, experts, frozen = held
    ranks = strategy.data_parallel_size * strategy.sp * strategy.cp
    shared = (setting.hardware, setting.job, setting.software, setting.constants)
    if strategy.ep == 1 or not experts:
        both = Held(
            trainable=dense + experts,
            frozen_bytes=frozen,
            calls=_sharded_calls(setting, stage, "all"),
            ranks=ranks,
            stride=strategy.tp,
        )
        return data_traffic(strategy, both, *shared)
    parts = (
        Held(
            trainable=dense,
            frozen_bytes=frozen,
            calls=_sharded_calls(setting, stage, "dense"),
            ranks=ranks,
            stride=strategy.tp,
        ),
        Held(
            trainable=experts,
            frozen_bytes=0.0,
            calls=_sharded_calls(setting, stage, "experts"),
            ranks=max(1, ranks // strategy.ep),
            stride=strategy.tp * strategy.ep,
        ),
    )
    return summed_traffic([data_traffic(strategy, part, *shared) for part in parts])


_Parameters = Literal["all", "dense", "experts"]


def _sharded_calls(setting: Setting, stage: PipelineStage, parameters: _Parameters) -> Calls:
    """Return the collectives of these parameters, if the engine shards them."""
    strategy, layers = setting.strategy, stage.num_layers
    if strategy.zero_stage == 3:
        recomputed = strategy.recomputed_layers(layers) / max(1, layers)
        return _zero3_calls(setting.model, setting.job, strategy.zero, strategy.ep, parameters, recomputed)
    # FSDP2 has a unit for each layer and one around them.
    unit = Gathered(share=1.0, calls=layers + 1)
    return Calls(forward=unit, backward=unit, reductions=layers + 1)


@lru_cache(maxsize=1024)
def _zero3_calls(
    model: ModelSpec, job: TrainingJob, zero: ZeroOptions, ep: int, parameters: _Parameters, recomputed: float
) -> Calls:
    gathered = engine_parameters(model, job)
    if ep > 1:
        gathered = expert_parallel_share(gathered, ep)
        kept = tuple(p for p in gathered.parameters if (p.kind == "experts") == (parameters == "experts"))
        gathered = replace(gathered, parameters=kept)
    forward, none = zero3_gathers(gathered, zero, recomputes=False)
    _, every = zero3_gathers(gathered, zero, recomputes=True)
    backward = Gathered(
        share=none.share + (every.share - none.share) * recomputed,
        calls=none.calls + (every.calls - none.calls) * recomputed,
        tensors=none.tensors + (every.tensors - none.tensors) * recomputed,
        modules=none.modules + (every.modules - none.modules) * recomputed,
    )
    trained: Sequence[ParameterShape] = gathered.parameters
    if job.method == "full":
        reductions = float(reduced_buckets(gathered, zero.reduce_bucket_size))
    else:
        trained = adapters(model, rank=job.lora_rank, targets=job.lora_targets)
        # Gradients of adapters are small, so that they fill a bucket.
        reductions = max(1.0, _adapters(model, job) / zero.reduce_bucket_size)
    gradients = sum(parameter.count for parameter in trained)
    return Calls(forward=forward, backward=backward, reductions=reductions, gradients=gradients)


def stepped_parameters(setting: Setting, held: tuple[float, float, float]) -> float:
    """Return the parameters that the optimizer updates on a rank of a stage."""
    strategy = setting.strategy
    dense, experts, _ = held
    if strategy.engine in ("ddp", "single") or strategy.zero_stage == 0:
        return dense + experts
    shards = setting.software.optimizer_ranks or strategy.shard_size
    return dense / shards + experts * strategy.ep / strategy.shard_size


def _adapter_passes(setting: Setting) -> tuple[Pass, Pass]:
    """Return what LoRA adds to an average layer's passes, beside its small products.

    PEFT 0.21 (tuners/lora/layer.py, `Linear.forward`) scales the update and adds it to the output: 10 bytes per output
    element, 4 in the backward pass, which adds two gradients of the input (6 bytes). Adapters in fp32 also cast the
    input to fp32, and autocast casts it back: 12 bytes in either pass.
    """
    job, constants = setting.job, setting.constants
    adapted = targeted_linears(setting.model, job.lora_targets)
    layers = max(1, setting.model.dimensions.num_layers)
    share = setting.batch.tokens * job.compute_bytes / (2 * layers * setting.strategy.tp)
    outputs = share * sum(weight.count * weight.shape[0] for weight in adapted)
    inputs = share * sum(weight.count * weight.shape[1] for weight in adapted)
    casts = 12 if setting.strategy.engine != "deepspeed" and job.compute_bytes == 2 else 0
    count = sum(weight.count for weight in adapted) / layers

    def added(traffic: float, kernels: float) -> Pass:
        seconds = traffic / setting.device.memory_bytes_per_s + kernels * constants.kernel_seconds
        return Pass(memory=seconds, kernels=kernels)

    return added(10 * outputs + casts * inputs, 6 * count), added(4 * outputs + (6 + casts) * inputs, 10 * count)


def _weight_traffic(setting: Setting, held: tuple[float, float, float]) -> float:
    """Return the seconds in which a micro-batch's gradients are added, and autocast casts weights and gradients.

    Adding a gradient takes two reads and a write. If gradients are reduced in every micro-batch, they are copied into a
    bucket of the reduction's type instead, and only a partition is added. Autocast reads fp32 weights and writes 16-bit
    ones in the forward pass, and the reverse for gradients.
    """
    strategy, job = setting.strategy, setting.job
    dense, experts, _ = held
    trainable = dense + experts
    autocast = strategy.engine in ("ddp", "single") and job.compute_bytes == 2
    gradient_bytes = setting.software.gradient_bytes
    if gradient_bytes is None:
        reduces_each = strategy.engine == "fsdp2" or (strategy.zero_stage or 0) >= 2
        gradient_bytes = 3.0 * job.compute_bytes
        if reduces_each:
            gradient_bytes = float(job.compute_bytes + (setting.software.reduction_bytes or job.compute_bytes))
    traffic = (24.0 if autocast else gradient_bytes) * trainable
    return traffic / setting.device.memory_bytes_per_s


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Predicted time of one optimizer step."""

    seconds: float
    low_seconds: float
    high_seconds: float
    tokens_per_second: float
    terms: dict[str, float]
    """Named parts of `seconds`."""
    learned_scale: float = 1.0
    """Factor from measured runs that `seconds` contains."""
    measured_runs: int = 0
    """Runs that this factor comes from."""
    learned_factors: dict[str, float] = field(default_factory=dict)
    """Factors of computation, network and host, where measured runs separate them; else empty."""


def estimate_step_time(
    strategy: Layout,
    model: ModelSpec,
    hardware: HardwareSpec,
    job: TrainingJob,
    *,
    software: Software | None = None,
    constants: GpuConstants | None = None,
) -> StepTime:
    """Return the time of one optimizer step of a layout, including gradient accumulation.

    Raises:
        UsageError: there are fewer layers than pipeline stages.
    """
    constants = constants or hardware_constants(hardware)
    slowest_seconds = 0.0
    if software is None and (plain := without_kernels(job)) != job:
        # No run of these layers corrects the prediction, so that the interval reaches to eager ones.
        slowest_seconds = estimate_step_time(strategy, model, hardware, plain, constants=constants).high_seconds
    if strategy.offload_variant == "zenflow":
        waits = replace(strategy, offload_variant="none")
        slowest_seconds = estimate_step_time(waits, model, hardware, job, constants=constants).high_seconds
    software = software or software_of(job, eager_attention=model.attention == "eager")
    setting = setting_of(strategy, model, hardware, job, software, constants)
    layers = model.dimensions.num_layers
    stages: tuple[PipelineStage, ...]
    if strategy.pp == 1:
        stages = (PipelineStage(index=0, first_layer=0, end_layer=layers, has_embedding=True, has_head=True),)
    elif software.even_stages:
        stages = contiguous_stages([(index + 1) * layers // strategy.pp for index in range(strategy.pp)])
    else:
        stages = pipeline_stages(model, job, strategy.pp, tensor_parallel_size=strategy.tp)
    # Middle stages with equally many layers cost the same.
    of_kind = {_kind(stage): stage for stage in stages}
    held = {kind: _held(setting, stage) for kind, stage in of_kind.items()}
    traffic = {kind: stage_traffic(setting, stage, held[kind]) for kind, stage in of_kind.items()}
    kinds = {kind: stage_terms(setting, stage, held[kind], traffic[kind]) for kind, stage in of_kind.items()}
    costs = {kind: sum(terms.values()) for kind, terms in kinds.items()}
    slowest = max(costs, key=lambda kind: costs[kind])
    micro_batches = strategy.gradient_accumulation_steps
    terms = {name: micro_batches * value for name, value in kinds[slowest].items()}
    if strategy.pp > 1:
        idle = sum(costs[_kind(stage)] for stage in stages) - costs[slowest]
        terms["pipeline_bubble"] = idle / software.virtual_stages
    first = _kind(stages[0])
    for name, value in _once(setting, held[first], traffic[first], kinds[first]).items():
        terms[name] = terms.get(name, 0.0) + value
    terms = {name: value for name, value in terms.items() if value > 0}
    seconds = sum(terms.values())
    hidden = 0.0
    if strategy.offload_variant == "superoffload":
        # Without clipping, which plans enable, the host steps during the backward pass (superoffload_stage3.py).
        hidden = min(terms.get("host_optimizer", 0.0), sum(kinds[first].values()) * 2 / 3)
    tokens = strategy.global_batch_size * job.seq_len_tokens
    return StepTime(
        seconds=seconds,
        low_seconds=max(0.0, seconds - hidden) / (1 + constants.error),
        high_seconds=max(seconds * (1 + constants.error), slowest_seconds),
        tokens_per_second=tokens / seconds,
        terms=terms,
    )


def _kind(stage: PipelineStage) -> tuple[int, bool, bool]:
    return stage.num_layers, stage.has_embedding, stage.has_head


def _orthogonalization_seconds(setting: Setting) -> float:
    """Return the seconds of Muon's Newton-Schulz iterations, whose matrices FSDP2 and ZeRO divide over ranks.

    Five iterations of an m x n matrix, m <= n, multiply m x n by n x m, m x m by m x m and m x m by m x n
    (torch/optim/_muon.py).
    """
    flops = 0.0
    for parameter in setting.model.parameters:
        if is_stepped_by_muon(parameter):
            small, large = min(parameter.shape), max(parameter.shape)
            flops += parameter.count * 5 * (4 * small**2 * large + 2 * small**3)
    ranks = setting.strategy.shard_size if setting.strategy.engine == "fsdp2" or setting.strategy.zero_stage else 1
    return flops / ranks / (setting.hardware.flops_per_s * setting.constants.matrix_efficiency)


def _once(
    setting: Setting, held: tuple[float, float, float], traffic: DataTraffic, micro_batch: Mapping[str, float]
) -> dict[str, float]:
    """Return the terms that occur once per step, on the first stage, which has the most parameters.

    `micro_batch` has the stage's terms of one micro-batch.
    """
    strategy, software = setting.strategy, setting.software
    terms = optimizer_seconds(
        strategy,
        setting.hardware,
        setting.job,
        software,
        setting.constants,
        parameters=stepped_parameters(setting, held),
    )
    if strategy.offload_variant == "zenflow":
        # The host steps while the micro-batches of the next step compute.
        hidden = strategy.gradient_accumulation_steps * sum(micro_batch.values())
        terms["host_optimizer"] = max(0.0, terms["host_optimizer"] - hidden)
    if OPTIMIZERS[setting.job.optimizer].matrix_states and "optimizer" in terms:
        terms["optimizer"] += _orthogonalization_seconds(setting)
    reduction, updates, slowed, slowed_updates = traffic.reductions_once, traffic.updates_once, 0.0, 0.0
    # Computation that can hide reductions of gradients and gathers of updates.
    computed = sum(micro_batch.get(name, 0.0) for name in _COMPUTED)
    # A pipeline reduces after its last micro-batch, without overlap.
    if overlaps_reductions(setting) and strategy.pp == 1:
        reduction, slowed = exposed(setting, reduction, computed * 2 / 3)
    if software.overlaps_updates:
        updates, slowed_updates = exposed(setting, updates, computed / 3)
    terms["gradient_reduction"] = reduction
    terms["overlap_slowdown"] = slowed + slowed_updates
    terms["parameter_updates"] = updates
    terms["step_overhead"] = software.step_seconds
    return terms


_COMPUTED = (
    "matrix_products",
    "attention",
    "memory_operations",
    "recomputation",
    "mlp_recomputation",
    "head_and_loss",
    "kernel_launches",
    "tensor_parallel",
)


TIME_TERM_MEANINGS: Mapping[str, str] = {
    "matrix_products": "products with the layers' weights, forward and backward: FLOPs / (peak * efficiency), which is "
    "lower for small products",
    "attention": "scores, softmax and values of all layers; fused kernels skip masked scores of causal models",
    "memory_operations": "norms, residuals, activation functions, rotary embeddings and adding gradients: bytes / "
    "memory bandwidth",
    "recomputation": "the second forward pass of recomputed layers",
    "mlp_recomputation": "tiled MLPs compute each tile again before its backward pass and add its gradients",
    "head_and_loss": "embedding, final norm, output head and loss, forward and backward",
    "kernel_launches": "time that the device waits while the host launches kernels and runs ZeRO-3 hooks, and host "
    "work per micro-batch",
    "waiting_for_ranks": "waiting for the slowest rank in collectives inside the layers",
    "tensor_parallel": "all-reduces of TP: four in each layer, six where it is recomputed",
    "sequence_parallel": "all-to-alls of SP: queries, keys, values and outputs, forward and backward",
    "context_parallel": "keys and values of CP, gathered forward, passed around and reduced backward",
    "expert_parallel": "all-to-alls of EP: dispatch and combine, forward and backward",
    "pipeline_transfers": "hidden states and their gradients between stages",
    "pipeline_bubble": "idle stages: before their first and after their last micro-batch, and while they wait for the "
    "slowest stage",
    "parameter_gathers": "gathers of sharded parameters and reductions per micro-batch that computation does not hide",
    "gradient_reduction": "the reduction of gradients once per step, as far as the last backward pass does not hide it",
    "overlap_slowdown": "slowdown of computation by concurrent communication, which uses bandwidth and processors",
    "optimizer": "the optimizer step: bytes of gradients, states and weights / memory bandwidth",
    "parameter_updates": "gathers of updated parameters after the step (ZeRO-1 and ZeRO-2)",
    "host_optimizer": "CPU Adam: bytes / bandwidth of host memory, which the ranks of a node share",
    "host_copies": "copies of gradients and parameters over PCIe",
    "checkpoint_copies": "copies of offloaded layer inputs over PCIe that computation does not hide",
    "nvme": "reads and writes of optimizer states on NVMe",
    "teacher_forward": "the forward pass of the teacher in every micro-batch",
    "step_overhead": "data loader, scheduler and logging, once per step",
}
"""One sentence for each term, by name."""

TIME_TERM_NAMES: Mapping[str, str] = {
    "memory_operations": "memory-bound operations",
    "parameter_gathers": "gathers and reductions not hidden by computation",
    "gradient_reduction": "reduction of gradients not hidden by computation",
    "parameter_updates": "gathers of updated parameters",
    "tensor_parallel": "all-reduces of TP",
    "sequence_parallel": "all-to-alls of SP",
    "context_parallel": "keys and values of CP",
    "expert_parallel": "all-to-alls of EP",
    "pipeline_transfers": "transfers between stages",
    "pipeline_bubble": "idle stages",
    "overlap_slowdown": "slowdown by concurrent communication",
    "host_copies": "copies over PCIe",
    "mlp_recomputation": "recomputation of MLP tiles",
    "checkpoint_copies": "copies of layer inputs over PCIe",
    "host_optimizer": "optimizer on the host",
}
"""Display names of terms, where they differ from the name."""


def time_term_name(term: str) -> str:
    """Return the display name of a term.

    >>> time_term_name("pipeline_bubble"), time_term_name("head_and_loss")
    ('idle stages', 'head and loss')
    """
    return TIME_TERM_NAMES.get(term, term.replace("_", " "))
