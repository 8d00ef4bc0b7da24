"""Seconds of collectives by latency and bandwidth, for a group of ranks on the links that it spans.

A collective of `S` bytes over `n` ranks moves `(n - 1) / n * S` (all-gather, reduce-scatter) or twice that
(all-reduce): the bus bandwidth of nccl-tests (PERFORMANCE.md). A ring takes `n - 1` hops each way, a tree two for each
doubling; NCCL has trees for all-reduces alone, and takes the faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from ..specs.hardware import HardwareSpec
from .collectives import group_bytes_per_s, others
from .constants import GpuConstants


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Ranks of one collective with their links."""

    ranks: int
    """Members."""
    bytes_per_s: float
    """Bus bandwidth that each member reaches."""
    hop_seconds: float
    """Latency of the slowest hop."""
    ring_seconds: float
    """Latency of a way round the ring, over hops within and between nodes."""
    tree_seconds: float
    """Latency of a tree to the root and back."""
    waiting_seconds: float
    """What members wait for the last of them, where nothing else hides it."""
    scatter_share: float
    """Time of a large all-gather or reduce-scatter over that of an all-reduce."""


def group_of(hardware: HardwareSpec, constants: GpuConstants, *, ranks: int, stride: int = 1) -> Group:
    """Return a group of `ranks` that lie `stride` apart (`collectives.py` says on which links)."""
    span, node = ranks * stride, hardware.gpus_per_node
    within = span <= node and (hardware.nodes == 1 or node % span == 0)
    raw = group_bytes_per_s(hardware, ranks=ranks, stride=stride)
    if within:
        rate, hop, nodes = raw * constants.link_efficiency, constants.link_latency_seconds, 1
    else:
        members = max(1, node // stride) if stride < node else 1
        nodes = ceil(ranks / members)
        rate = min(hardware.link_bytes_per_s * constants.link_efficiency, raw * constants.network_efficiency)
        hop = constants.network_latency_seconds
    inside = max(1.0, ranks / nodes)
    tree = 2 * (log2(inside) * constants.link_latency_seconds + log2(nodes) * constants.network_latency_seconds)
    return Group(
        ranks=ranks,
        bytes_per_s=rate,
        hop_seconds=hop,
        ring_seconds=(ranks - nodes) * constants.link_latency_seconds + (nodes - 1) * hop,
        tree_seconds=tree,
        waiting_seconds=constants.synchronization_seconds,
        scatter_share=constants.scatter_share,
    )


def gather_seconds(group: Group, size_bytes: float, *, calls: float = 1.0) -> float:
    """Return the seconds of all-gathers (or reduce-scatters) of `size_bytes` together, in `calls` collectives."""
    if group.ranks == 1 or size_bytes <= 0:
        return 0.0
    return 2 * group.scatter_share * others(group.ranks) * size_bytes / group.bytes_per_s + calls * group.ring_seconds


def reduction_seconds(group: Group, size_bytes: float, *, calls: float = 1.0) -> float:
    """Return the seconds of all-reduces of `size_bytes` together, in `calls` collectives."""
    if group.ranks == 1 or size_bytes <= 0:
        return 0.0
    latency = min(2 * group.ring_seconds, group.tree_seconds)
    return 2 * others(group.ranks) * size_bytes / group.bytes_per_s + calls * latency


def exchange_seconds(group: Group, size_bytes: float, *, calls: float = 1.0) -> float:
    """Return the seconds of all-to-alls in which each rank sends `size_bytes`, its own part included."""
    if group.ranks == 1 or size_bytes <= 0:
        return 0.0
    latency = group.hop_seconds * log2(group.ranks)
    return others(group.ranks) * size_bytes / group.bytes_per_s + calls * latency
