"""The physical constants of each accelerator generation: what a datasheet does not say about its speed.

`data/step_time.toml` holds them with the source of each; `tools/step_time_fit.py` fits those that are fitted, jointly
over all published tables of a generation. A generation without tables takes the constants of the nearest one that has
them, and the interval of its step times is wider.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib.resources import files
from typing import Any

from ..specs.hardware import HardwareSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuConstants:
    """Shares of their datasheets that an accelerator, its host and its links reach."""

    matrix_efficiency: float
    """Share of the datasheet's matrix FLOP/s that large products reach at the clock that the power limit sustains."""
    product_border: float
    """Rows and columns that a product pays beyond its own: half-filled tiles and waves."""
    product_depth: float
    """Inner elements that a product pays beyond its own: filling and draining the pipeline of each tile."""
    backward_slowdown: float
    """Time of backward products over forward ones of the same FLOPs: transposed operands, and weight gradients whose
    inner dimension is the tokens."""
    attention_efficiency: float
    """Share of the datasheet's matrix FLOP/s that fused attention reaches."""
    memory_efficiency: float
    """Share of the datasheet's memory bandwidth that memory-bound operations reach."""
    launch_seconds: float
    """Host time of launching one kernel from PyTorch: Python, dispatcher, autograd and driver."""
    kernel_seconds: float
    """Device time that a kernel costs beyond its work: start, tail and the gap to the next one."""
    link_efficiency: float
    """Share of the link's bandwidth within a node that large collectives reach (bus bandwidth of nccl-tests)."""
    network_efficiency: float
    """Share of the network's bandwidth that large collectives reach."""
    link_latency_seconds: float
    """Latency of one hop within a node, protocol and kernel included."""
    network_latency_seconds: float
    """Latency of one hop between nodes."""
    synchronization_seconds: float
    """What a collective inside a layer costs beyond its transfer: its ranks reach it one after the other."""
    host_link_bytes_per_s: float
    """One direction between an accelerator and its host, as large pinned copies reach it."""
    unaligned_efficiency: float
    """Speed of products with an odd width, relative to those whose widths are multiples of 8 elements."""
    fp32_share: float
    """FLOP/s of fp32 products over those of 16-bit ones, without TF32 (PyTorch's default)."""
    host_exponent: float
    """How host and device share a micro-batch, `(device^x + host^x)^(1/x)`: 1 when one always waits for the other,
    infinite when the host always runs ahead."""
    overlap_slowdown: float
    """Computation that is lost for each second of communication beside it: both use memory bandwidth and processors."""
    scatter_share: float = 0.5
    """Time of a large all-gather or reduce-scatter over that of an all-reduce of as many bytes: half of it on rings."""
    kept_products_seconds: float = 0.0
    """Host time of a layer that keeps its products: Python looks at every operator, forward and recomputed."""
    zero3_hook_seconds: float = 0.0
    """Host time of ZeRO-3's hooks for each pass over a layer (forward, recomputed, backward)."""
    error: float
    """Half width of the interval of a step time, relative: nine of ten published measurements lie within it."""
    source: str
    """Where the numbers come from."""
    assumed: bool = False
    """Whether another generation's constants stand in for this one."""


@lru_cache(maxsize=1)
def _tables() -> Mapping[str, Any]:
    text = files(__package__.rpartition(".")[0]).joinpath("data/step_time.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@lru_cache(maxsize=64)
def constants_of(gpu: str) -> GpuConstants:
    """Return the constants of an accelerator by its catalog name; of the nearest generation where it has none.

    >>> constants_of("A100-80GB").assumed, constants_of("RTX4090").assumed
    (False, True)
    """
    tables = _tables()
    generation = tables["generations"].get(gpu)
    known = {field.name for field in fields(GpuConstants)}
    values = tables["constants"][generation or "default"]
    if generation is None:
        values = tables["constants"][values["like"]] | values | {"assumed": True}
    elif "like" in values:
        values = tables["constants"][values["like"]] | values
    return GpuConstants(**{name: value for name, value in values.items() if name in known})


def hardware_constants(hardware: HardwareSpec) -> GpuConstants:
    """Return the constants of a cluster's accelerators."""
    return constants_of(hardware.gpu)
