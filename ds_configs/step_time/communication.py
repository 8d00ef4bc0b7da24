"""Seconds of collectives: gathers and reductions of data parallelism, exchanges of the other axes, and transfers."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from ..memory.communication import Gathered
from ..specs.terms import StepTerm
from .model_work import StepInputs
from .rates import exchange_seconds, gather_seconds, group_of, reduction_seconds

TERMS = (
    StepTerm("waiting_for_ranks", "waiting for the slowest rank in collectives inside the layers"),
    StepTerm(
        "tensor_parallel",
        "all-reduces of TP: four in each layer, six where it is recomputed",
        label="all-reduces of TP",
    ),
    StepTerm(
        "sequence_parallel",
        "all-to-alls of SP: queries, keys, values and outputs, forward and backward",
        label="all-to-alls of SP",
    ),
    StepTerm(
        "context_parallel",
        "keys and values of CP, gathered forward, passed around and reduced backward",
        label="keys and values of CP",
    ),
    StepTerm(
        "expert_parallel",
        "all-to-alls of EP: dispatch and combine, forward and backward",
        label="all-to-alls of EP",
    ),
    StepTerm(
        "pipeline_transfers",
        "hidden states and their gradients between stages",
        label="transfers between stages",
    ),
    StepTerm(
        "parameter_gathers",
        "gathers of sharded parameters and reductions per micro-batch that computation does not hide",
        label="gathers and reductions not hidden by computation",
    ),
    StepTerm(
        "gradient_reduction",
        "the reduction of gradients once per step, as far as the last backward pass does not hide it",
        label="reduction of gradients not hidden by computation",
    ),
    StepTerm(
        "parameter_updates",
        "gathers of updated parameters after the step (ZeRO-1 and ZeRO-2)",
        label="gathers of updated parameters",
    ),
)


_DDP_BUCKET_BYTES = 25 * 2**20
"""Default bucket of `DistributedDataParallel` (`bucket_cap_mb=25`)."""


class DataTraffic(NamedTuple):
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


def data_traffic(
    step: StepInputs, *, trainable: float, frozen_bytes: float, calls: Calls, ranks: int, stride: int
) -> DataTraffic:
    """Return the collectives of a group of parameters.

    `trainable` elements and `frozen_bytes` are before sharding over `ranks`, which have the distance `stride`; `calls`
    are those of a micro-batch, if FSDP2 or ZeRO-3 shards them.
    """
    if ranks == 1:
        return DataTraffic()
    layout, hardware, software, constants = step.layout, step.hardware, step.software, step.constants
    width, zero = step.job.compute_bytes, layout.zero
    reduces_fp32 = layout.engine in ("single", "ddp") or layout.sp > 1
    reduced_width = software.reduction_bytes or (4 if reduces_fp32 else width)
    group = group_of(hardware, constants, ranks=ranks, stride=stride)
    gradients = trainable * reduced_width
    if layout.shards_parameters:
        shard = max(1, ranks // layout.dp_replicate) if layout.engine == "fsdp2" else ranks
        group = group_of(hardware, constants, ranks=shard, stride=stride)
        weights = trainable * (1 if zero.quantized_weights else width) + frozen_bytes
        again = group
        if zero.hpz_partition_size > 1:
            again = group_of(hardware, constants, ranks=zero.hpz_partition_size, stride=stride)
        forward, backward = (
            gather_seconds(among, weights * gathered.share, calls=gathered.calls)
            for among, gathered in zip((group, again), (calls.forward, calls.backward), strict=True)
        )
        if zero.quantized_gradients:
            gradients = trainable * 0.5
        reduction = gather_seconds(group, gradients, calls=calls.reductions if trainable else 0)
        if layout.engine == "fsdp2" and layout.dp_replicate > 1:
            replicas = group_of(hardware, constants, ranks=layout.dp_replicate, stride=shard * stride)
            reduction += reduction_seconds(replicas, gradients / shard, calls=calls.reductions)
        return DataTraffic(gathers_forward=forward, gathers_backward=backward, reductions_each=reduction)
    if layout.engine in ("ddp", "single"):
        buckets = ceil(gradients / _DDP_BUCKET_BYTES)
        return DataTraffic(reductions_once=reduction_seconds(group, gradients, calls=buckets))
    buckets = ceil(trainable / max(1, zero.reduce_bucket_size))
    reduction = reduction_seconds(group, gradients, calls=buckets)
    if not layout.zero_stage:
        return DataTraffic(reductions_once=reduction)
    owners = min(software.optimizer_ranks or ranks, ranks)
    holders = group_of(hardware, constants, ranks=owners, stride=stride)
    # Reducing each slice to its owner costs half of an all-reduce. States shared by a few ranks need the sum on all.
    if software.reduces_to_owners and owners == ranks:
        reduction = gather_seconds(group, gradients, calls=0) + reduction_seconds(group, 1.0, calls=buckets)
    update = gather_seconds(holders, trainable * width, calls=ceil(trainable / software.update_bucket))
    if layout.zero_stage == 2:
        return DataTraffic(reductions_each=reduction, updates_once=update)
    return DataTraffic(reductions_once=reduction, updates_once=update)


def exchanges(step: StepInputs, *, layers: float, recomputed: float, with_head: bool) -> tuple[dict[str, float], float]:
    """Return the seconds of the collectives of each axis, by term, and the seconds that ranks wait for each other."""
    layout, work, hardware, constants = step.layout, step.work, step.hardware, step.constants
    tokens, element_bytes = step.tokens, step.job.compute_bytes
    terms: dict[str, float] = {}
    waiting = 0.0
    hidden = tokens * work.whole.hidden_size * element_bytes
    if layout.tp > 1:
        group = group_of(hardware, constants, ranks=layout.tp)
        # Two all-reduces forward and two backward (Megatron-LM, arXiv 1909.08053, section 3).
        calls = 4 * layers + 2 * recomputed
        terms["tensor_parallel"] = reduction_seconds(group, calls * hidden, calls=calls)
        if with_head and work.head_rows:
            terms["tensor_parallel"] += reduction_seconds(group, hidden)
        if with_head and work.gathered_vocabulary:
            logits = tokens * work.gathered_vocabulary * element_bytes
            terms["tensor_parallel"] += gather_seconds(group, logits, calls=1)
        waiting += calls * group.waiting_seconds
    if layout.sp > 1:
        group = group_of(hardware, constants, ranks=layout.sp)
        # All-to-alls of q, k, v and the output, forward and backward (Ulysses, arXiv 2309.14509, section 3.2). Fewer
        # key/value heads than ranks are repeated (deepspeed/runtime/sequence_parallel/ulysses_sp.py:147).
        repeated = max(1, layout.sp // work.whole.num_key_value_heads)
        width = 2 * work.whole.query_size + 2 * work.whole.key_value_size * repeated
        passes = 2 * layers + recomputed
        terms["sequence_parallel"] = exchange_seconds(group, passes * tokens * width * element_bytes, calls=4 * passes)
        waiting += 4 * passes * group.waiting_seconds
    if layout.cp > 1:
        group = group_of(hardware, constants, ranks=layout.cp)
        # Keys and values are gathered in the forward pass and passed around again in the backward pass: n - 1 shards
        # each. Their gradients are passed around in fp32, in n steps, after which each rank has its own (Ring
        # Attention, arXiv 2310.01889; torch 2.13.0, `_context_parallel/_attention.py`).
        shard = tokens * 2 * work.whole.key_value_size
        volume = (2 * (layout.cp - 1) * element_bytes + 4 * layout.cp) * shard
        passes = layers + recomputed / 3
        calls = 3 * passes
        terms["context_parallel"] = passes * volume / group.bytes_per_s + gather_seconds(group, 1.0, calls=calls)
        waiting += calls * group.waiting_seconds
    if layout.ep > 1:
        group = group_of(hardware, constants, ranks=layout.ep, stride=layout.tp)
        # Dispatch and combine, forward and backward (GShard, arXiv 2006.16668).
        calls = 4 * layers + 2 * recomputed
        terms["expert_parallel"] = exchange_seconds(group, calls * hidden * work.whole.experts_per_token, calls=calls)
        waiting += calls * group.waiting_seconds
    return terms, waiting


def transfer_seconds(step: StepInputs) -> float:
    """Return the seconds in which a stage sends one micro-batch: hidden states forward, their gradients backward.

    The slowest boundary limits the pipeline; with several nodes it is between two nodes. Each tensor-parallel rank
    sends the complete tensor over its own network adapter, unless the software scatters it.
    """
    hardware, constants = step.hardware, step.constants
    tokens = int(step.tokens / (step.layout.tp if step.software.scatters_transfers else 1))
    volume = 2 * tokens * step.work.whole.hidden_size * step.job.compute_bytes
    if hardware.nodes == 1:
        return volume / (hardware.link_bytes_per_s * constants.link_efficiency) + 2 * constants.link_latency_seconds
    rate = hardware.network_bytes_per_s * constants.network_efficiency
    return volume / rate + 2 * constants.network_latency_seconds
