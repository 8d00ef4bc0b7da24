"""Exchanges of the axes beyond data parallelism inside the layers of one micro-batch; computation waits for them."""

from __future__ import annotations

from ..specs.hardware import HardwareSpec
from ..specs.strategy import Strategy
from . import collectives
from .constants import GpuConstants
from .links import exchange_seconds, gather_seconds, group_of, reduction_seconds
from .model_work import ModelWork


def exchanges(
    strategy: Strategy,
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
    """Return the seconds of each axis, by term, and what ranks wait for each other.

    Args:
        strategy: The layout.
        work: The rank's part of the model.
        hardware: The cluster.
        constants: What its links reach.
        tokens: Tokens of the micro-batch on a rank.
        layers: Decoder layers of the rank.
        recomputed: Layers whose forward pass, with its collectives, runs again.
        with_head: Whether the output head is here.
        element_bytes: Bytes of an activation.
    """
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
        # All-to-alls of q, k, v and the output, forth and back (Ulysses, arXiv 2309.14509, section 3.2). Fewer
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
        # Three passes of keys and values: gathered forward, passed round and reduced backward.
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
    """Return what a stage spends on passing one micro-batch on: hidden states forward, their gradients back.

    The slowest boundary sets the pace: on several nodes one always lies between two of them. Each rank of tensor
    parallelism sends the whole tensor, over a network adapter of its own.
    """
    volume = collectives.pipeline_bytes(tokens=int(tokens), hidden_size=hidden_size, element_bytes=element_bytes)
    if hardware.nodes == 1:
        return volume / (hardware.link_bytes_per_s * constants.link_efficiency) + 2 * constants.link_latency_seconds
    rate = hardware.network_bytes_per_s * constants.network_efficiency
    return volume / rate + 2 * constants.network_latency_seconds
