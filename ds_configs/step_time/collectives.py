"""Seconds of the collectives of each parallel axis, from volumes and link bandwidths; pure functions on numbers.

A ring collective over ranks of several nodes runs as fast as the slower of an accelerator's link and the network
adapters of the members that one node holds: ranks lie as `pp, dp, sp or cp, tp` from outside to inside
(deepspeed/runtime/pipe/topology.py:244, accelerate/parallelism_config.py `_get_mesh`), so neighbours in `tp` and `sp`
share a node, and the members of a data-parallel group share it with those of the groups beside theirs.
"""

from __future__ import annotations

from math import gcd

from ..specs.hardware import HardwareSpec


def group_bytes_per_s(hardware: HardwareSpec, *, ranks: int, stride: int = 1) -> float:
    """Return the bandwidth of a group of `ranks` that lie `stride` apart.

    All groups work at once, so of a node's adapters each gets those of its members there; where groups straddle the
    borders of nodes, the slowest has as few members on one side as the sizes' common divisor.
    """
    span, node = ranks * stride, hardware.gpus_per_node
    if span <= node and (hardware.nodes == 1 or node % span == 0):
        return hardware.link_bytes_per_s
    members_of_a_node = max(1, gcd(span, node) // stride)
    return min(hardware.link_bytes_per_s, hardware.network_bytes_per_s * members_of_a_node)


def others(ranks: int) -> float:
    """Return the share of a tensor that comes from other ranks, `(n - 1) / n`: one all-gather or reduce-scatter."""
    return (ranks - 1) / ranks


def context_parallel_bytes(*, cp: int, tokens: int, key_value_size: int, layers: int, element_bytes: int) -> float:
    """Return what a rank moves for one micro-batch: keys and values of all others, and their gradients back.

    Gathered in the forward pass, passed round again in the backward pass and reduced: 3 times `(n - 1)` shards
    (Ring Attention, arXiv 2310.01889; torch `experimental/_context_parallel`).
    """
    return 3 * (cp - 1) * (tokens / cp) * 2 * key_value_size * layers * element_bytes


def pipeline_bytes(*, tokens: int, hidden_size: int, element_bytes: int) -> float:
    """Return what a stage passes on for one micro-batch: hidden states forward, their gradients back."""
    return 2 * tokens * hidden_size * element_bytes
