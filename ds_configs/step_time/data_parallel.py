"""Traffic of data parallelism: gathers of sharded parameters and reductions of gradients, per micro-batch and step.

Volumes follow ZeRO (arXiv 1910.02054, section 7), but for ZeRO-1 and ZeRO-2, which DeepSpeed all-reduces
(`software.py`). DDP and ZeRO 0 and 1 reduce once in a step, ZeRO-2 every micro-batch, ZeRO-3 and FSDP2 gather twice and
reduce in every micro-batch. DDP under autocast keeps and reduces fp32
gradients; DeepSpeed reduces in compute precision, and in fp32 under sequence parallelism
(deepspeed/runtime/engine.py:2182); FSDP2 reduces in compute precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from ..specs.hardware import HardwareSpec
from ..specs.job import TrainingJob
from ..specs.strategy import Strategy
from .constants import GpuConstants
from .links import gather_seconds, group_of, reduction_seconds
from .software import Software

_DDP_BUCKET_BYTES = 25 * 2**20
"""Default bucket of `DistributedDataParallel` (`bucket_cap_mb=25`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataTraffic:
    """Seconds of collectives of a rank, nothing overlapped."""

    gathers_forward: float = 0.0
    """All-gathers of parameters in each forward pass."""
    gathers_backward: float = 0.0
    """All-gathers of parameters in each backward pass."""
    reductions_each: float = 0.0
    """Reductions of gradients in each micro-batch."""
    reductions_once: float = 0.0
    """Reductions of gradients after the last micro-batch."""
    updates_once: float = 0.0
    """All-gathers of updated parameters after the optimizer step, beside nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """Parameters that a group of ranks shares, before sharding."""

    trainable: float
    """Elements with gradients."""
    frozen_bytes: float
    """Bytes of elements without."""
    layers: float
    """Decoder layers that hold them."""
    ranks: int
    """Ranks over which they are replicated or sharded."""
    stride: int
    """Distance of these ranks."""


def data_traffic(
    strategy: Strategy,
    held: Held,
    hardware: HardwareSpec,
    job: TrainingJob,
    software: Software,
    constants: GpuConstants,
) -> DataTraffic:
    """Return the collectives of one part of the parameters."""
    if held.ranks == 1:
        return DataTraffic()
    width, zero = job.compute_bytes, strategy.zero
    reduced_width = software.reduction_bytes or _reduction_bytes(strategy, job)
    group = group_of(hardware, constants, ranks=held.ranks, stride=held.stride)
    gradients = held.trainable * reduced_width
    if strategy.engine == "fsdp2" or strategy.zero_stage == 3:
        return _sharded(strategy, held, hardware, job, constants, gradients)
    if strategy.engine in ("ddp", "single"):
        calls = ceil(gradients / _DDP_BUCKET_BYTES)
        return DataTraffic(reductions_once=reduction_seconds(group, gradients, calls=calls))
    calls = ceil(held.trainable / max(1, zero.reduce_bucket_size))
    reduction = reduction_seconds(group, gradients, calls=calls)
    if not strategy.zero_stage:
        return DataTraffic(reductions_once=reduction)
    owners = min(software.optimizer_ranks or held.ranks, held.ranks)
    holders = group_of(hardware, constants, ranks=owners, stride=held.stride)
    # Half of an all-reduce, where each slice goes to its one owner; states that a few ranks share need the sum on all.
    if software.reduces_to_owners and owners == held.ranks:
        reduction = gather_seconds(group, gradients, calls=0) + reduction_seconds(group, 1.0, calls=calls)
    update = gather_seconds(holders, held.trainable * width, calls=ceil(held.trainable / software.update_bucket))
    if strategy.zero_stage == 2:
        return DataTraffic(reductions_each=reduction, updates_once=update)
    return DataTraffic(reductions_once=reduction, updates_once=update)


def _sharded(
    strategy: Strategy,
    held: Held,
    hardware: HardwareSpec,
    job: TrainingJob,
    constants: GpuConstants,
    gradients: float,
) -> DataTraffic:
    zero, width = strategy.zero, job.compute_bytes
    shard = max(1, held.ranks // strategy.dp_replicate) if strategy.engine == "fsdp2" else held.ranks
    group = group_of(hardware, constants, ranks=shard, stride=held.stride)
    weights = held.trainable * (1 if zero.quantized_weights else width) + held.frozen_bytes
    calls = held.layers + 1
    if strategy.zero_stage == 3:
        # Modules are gathered in buckets of the prefetch size, at least one for each layer.
        calls = max(calls, (held.trainable + held.frozen_bytes / width) / max(1, zero.stage3_prefetch_bucket_size))
    forward = gather_seconds(group, weights, calls=calls)
    backward = forward
    if zero.hpz_partition_size > 1:
        inside = group_of(hardware, constants, ranks=zero.hpz_partition_size, stride=held.stride)
        backward = gather_seconds(inside, weights, calls=calls)
    if zero.quantized_gradients:
        gradients = held.trainable * 0.5
    reduction_calls = (
        min(calls, held.layers + 1)
        if strategy.engine == "fsdp2"
        else max(1.0, held.trainable / max(1, zero.reduce_bucket_size))
    )
    reduction = gather_seconds(group, gradients, calls=reduction_calls if held.trainable else 0)
    if strategy.engine == "fsdp2" and strategy.dp_replicate > 1:
        replicas = group_of(hardware, constants, ranks=strategy.dp_replicate, stride=shard * held.stride)
        reduction += reduction_seconds(replicas, gradients / shard, calls=reduction_calls)
    return DataTraffic(gathers_forward=forward, gathers_backward=backward, reductions_each=reduction)


def _reduction_bytes(strategy: Strategy, job: TrainingJob) -> int:
    if strategy.engine in ("single", "ddp") or strategy.sp > 1:
        return 4
    return job.compute_bytes


def summed_traffic(parts: list[DataTraffic]) -> DataTraffic:
    """Return the collectives of all parts, one after the other."""
    return DataTraffic(
        gathers_forward=sum(part.gathers_forward for part in parts),
        gathers_backward=sum(part.gathers_backward for part in parts),
        reductions_each=sum(part.reductions_each for part in parts),
        reductions_once=sum(part.reductions_once for part in parts),
        updates_once=sum(part.updates_once for part in parts),
    )
