"""Rates of hardware and software: measured or published constants, links, collectives, kernels."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from importlib.resources import files
from math import ceil, gcd, log2
from typing import Any, Literal

from ..specs.hardware import HardwareSpec
from ..specs.job import TrainingJob


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuConstants:
    """Efficiency of an accelerator, its host and its links, relative to their datasheets."""

    matrix_efficiency: float
    """Share of the datasheet's matrix FLOP/s that large products reach at the clock that the power limit sustains."""
    product_border: float
    """Rows and columns that a product costs in addition: partly filled tiles and waves."""
    product_depth: float
    """Inner elements that a product costs in addition: filling and draining the pipeline of each tile."""
    backward_slowdown: float
    """Time of backward products divided by forward ones of equal FLOPs: operands are transposed, and the inner
    dimension of weight gradients is the tokens."""
    attention_efficiency: float
    """Share of the datasheet's matrix FLOP/s that fused attention reaches."""
    sdpa_efficiency: float = 0.0
    """The same for the kernel that PyTorch's SDPA selects today, over both passes of long causal sequences with heads
    of 128; 0: as fused attention."""
    sdpa_narrow_efficiency: float = 0.0
    """The same for heads of 64 or less."""
    sdpa_half_tokens: float = 0.0
    """Tokens of a sequence with which this kernel reaches half of its efficiency: `s / (s + half)` of it with s."""
    flash_efficiency: float = 0.0
    """As `sdpa_efficiency` for the FlashAttention 2 of Transformers, where SDPA selects a faster kernel."""
    flash_half_tokens: float = 0.0
    """As `sdpa_half_tokens` for this kernel."""
    memory_efficiency: float
    """Share of the datasheet's memory bandwidth that memory-bound operations reach."""
    elementwise_efficiency: float
    """The same for PyTorch's element-wise kernels on contiguous tensors."""
    launch_seconds: float
    """Host time of launching one kernel from PyTorch: Python, dispatcher, autograd and driver."""
    kernel_seconds: float
    """Device time of a kernel beyond its work: start, tail and the gap to the next one."""
    link_efficiency: float
    """Share of the link's bandwidth within a node that large collectives reach (bus bandwidth of nccl-tests)."""
    network_efficiency: float
    """Share of the network's bandwidth that large collectives reach."""
    link_latency_seconds: float
    """Latency of one hop within a node, protocol and kernel included."""
    network_latency_seconds: float
    """Latency of one hop between nodes."""
    synchronization_seconds: float
    """Time of a collective inside a layer beyond its transfer, because ranks reach it at different times."""
    host_link_bytes_per_s: float
    """Bandwidth between accelerator and host in one direction, for large pinned copies."""
    unaligned_efficiency: float
    """Speed of products with an odd width, relative to those whose widths are multiples of 8 elements."""
    fp32_share: float
    """The datasheet's FLOP/s of fp32 divided by those of 16-bit products, without TF32 (PyTorch's default)."""
    fp32_efficiency: float
    """Share of the datasheet's fp32 FLOP/s that large fp32 products reach; these do not run on tensor cores."""
    host_exponent: float
    """Exponent x in the time of a micro-batch, `(device^x + host^x)^(1/x)`: 1 if one always waits for the other,
    infinite if the host always runs ahead."""
    overlap_slowdown: float
    """Computation lost per second of concurrent communication, which uses memory bandwidth and processors."""
    group_rows: int = 128
    """Multiple to which a grouped kernel fills the rows of each expert; half of it with up to 128 rows on average."""
    grouped_slowdown: float = 1.0
    """Time of grouped products during a collective, relative to that without."""
    scatter_share: float = 0.5
    """Time of a large all-gather or reduce-scatter divided by that of an equal all-reduce: one half on rings."""
    zero3_module_seconds: float
    """Host time of ZeRO-3's hooks per module and pass (forward, recomputed, backward)."""
    zero3_gather_seconds: float
    """Host time of ZeRO-3 to gather and release a tensor."""
    zero3_gradient_seconds: float
    """Host time of ZeRO-3 to put a gradient into a bucket and its partition."""
    zero3_reduction_seconds: float
    """Host time of ZeRO-3 to reduce a bucket of gradients."""
    fsdp2_unit_seconds: float
    """Host time of FSDP2's hooks per unit and pass: gather, copies, reduction."""
    fsdp2_tensor_seconds: float
    """Host time of FSDP2 per tensor of a unit and pass."""
    error: float
    """Relative half width of the step time interval, which contains nine of ten published measurements."""
    source: str
    """Origin of the constants."""
    borrowed_from: str | None = None
    """An accelerator of the generation whose constants these are, if there are none for this one."""

    def __hash__(self) -> int:
        """Return a cheap hash, because constants are keys of caches."""
        return hash((self.matrix_efficiency, self.launch_seconds, self.error))


@lru_cache(maxsize=1)
def _tables() -> Mapping[str, Any]:
    text = files(__package__.rpartition(".")[0]).joinpath("data/step_time.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@lru_cache(maxsize=64)
def constants_of(gpu: str) -> GpuConstants:
    """Return the constants of an accelerator by its catalog name, or those of the generation that it borrows from.

    A newer or unknown accelerator borrows from the newest generation that was measured.

    >>> [constants_of(gpu).borrowed_from for gpu in ("A100-80GB", "RTX4090", "B200")]
    [None, 'A100', 'H100']
    """
    tables = _tables()
    generation = tables["generations"].get(gpu)
    default = tables["constants"]["default"]
    if generation is None:
        lender = tables["borrowed"].get(gpu, default["like"])
        owner = next(name for name, own in tables["generations"].items() if own == lender)
        values = _generation(lender) | {"borrowed_from": owner.partition("-")[0]}
        values |= {name: default[name] for name in ("error", "source")}
    else:
        values = _generation(generation)
    known = {field.name for field in fields(GpuConstants)}
    return GpuConstants(**{name: value for name, value in values.items() if name in known})


def _generation(name: str) -> dict[str, Any]:
    values: dict[str, Any] = _tables()["constants"][name]
    return _generation(values["like"]) | values if "like" in values else values


def group_bytes_per_s(hardware: HardwareSpec, *, ranks: int, stride: int = 1) -> float:
    """Return the bandwidth of a group of `ranks` with distance `stride`.

    All groups communicate concurrently, so each uses the network adapters of its members in a node. If groups cross
    node boundaries unevenly, the slowest has as few members in a node as the greatest common divisor of the sizes.
    """
    span, node = ranks * stride, hardware.gpus_per_node
    if span <= node and (hardware.nodes == 1 or node % span == 0):
        return hardware.link_bytes_per_s
    members_of_a_node = max(1, gcd(span, node) // stride)
    return min(hardware.link_bytes_per_s, hardware.network_bytes_per_s * members_of_a_node)


def others(ranks: int) -> float:
    """Return the share of a tensor that comes from other ranks in an all-gather or reduce-scatter, `(n - 1) / n`."""
    return (ranks - 1) / ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Ranks of one collective with their links."""

    ranks: int
    bytes_per_s: float
    """Bus bandwidth of each member."""
    hop_seconds: float
    """Latency of the slowest hop."""
    ring_seconds: float
    """Latency of one round on the ring, over hops within and between nodes."""
    tree_seconds: float
    """Latency of a tree to the root and back."""
    waiting_seconds: float
    """Time that members wait for the last one."""
    scatter_share: float
    """Time of a large all-gather or reduce-scatter over that of an all-reduce."""


@lru_cache(maxsize=4096)
def group_of(hardware: HardwareSpec, constants: GpuConstants, *, ranks: int, stride: int = 1) -> Group:
    """Return a group of `ranks` with distance `stride`."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Software:
    """Costs of a software stack; bytes are per element of a 16-bit activation."""

    attention: Literal["fused", "sdpa", "flash_attention_2", "eager"] = "fused"
    """Fused kernels (FlashAttention, SDPA) keep scores on chip and skip the masked half; eager ones write scores."""
    waits_in_layers: bool = False
    """Whether the host waits for the device in each layer's attention if a micro-batch has one sequence. Transformers
    asks whether it is packed (5.17.0, `_is_packed_sequence`), for which NVIDIA Automodel has a patch
    (`FSDP2Config.patch_is_packed_sequence`)."""
    elementwise: bool = False
    """Whether the traffic of layers and loss is counted kernel by kernel, so that `elementwise_efficiency` applies."""
    hidden_bytes_forward: float
    """Memory traffic of norms, residuals and dropout in a layer's forward pass, per element of hidden size."""
    hidden_bytes_backward: float
    """The same in the backward pass."""
    inner_bytes_forward: float
    """Memory traffic of the activation function, per element of the MLP's inner width."""
    inner_bytes_backward: float
    """The same in the backward pass."""
    projected_bytes: float = 0.0
    """Memory traffic of rotary embeddings and transposes, per element of queries and keys, both passes."""
    normed_bytes_forward: float = 0.0
    """Memory traffic of norms of queries and keys, where a model has them, per element of both."""
    normed_bytes_backward: float = 0.0
    """The same in the backward pass."""
    score_bytes_forward: float = 0.0
    """Memory traffic of eager attention per score between its products: mask, softmax, dropout."""
    score_bytes_backward: float = 0.0
    """The same in the backward pass."""
    loss_bytes: float
    """Memory traffic of the loss per logit, both passes: casts, softmax, its gradient."""
    kernels_forward: float
    """Kernels that a layer's forward pass launches."""
    kernels_backward: float
    """Kernels that a layer's backward pass launches."""
    kernels_outside: float = 60.0
    """Kernels of embedding, final norm, head and loss, both passes."""
    optimizer_bytes: float
    """Memory traffic of the optimizer step per parameter: gradients, norm, states, weights."""
    gradient_bytes: float | None = None
    """Memory traffic of adding a micro-batch's gradient per parameter; `None` for two reads and a write, or for the
    copy and cast into a bucket of `reduction_bytes` if gradients are reduced in every micro-batch."""
    step_seconds: float = 0.0
    """Host time per step: data loader, scheduler, logging."""
    micro_batch_seconds: float = 0.0
    """Host time per micro-batch beyond kernel launches: engine hooks, collation, copies to the device."""
    copies_gathered: bool = False
    """Whether a gather of FSDP copies its result into the parameters, on the stream that computes (torch 2.13.0,
    `foreach_all_gather_copy_out` of FSDP2; FSDP1 gathers in place)."""
    overlaps_reduction: bool = True
    """Whether gradients are reduced during the backward pass of the last micro-batch."""
    overlaps_updates: bool = False
    """Whether updated parameters are gathered during the forward pass of the first micro-batch (Megatron-Core's
    `--overlap-param-gather`)."""
    overlapped_tensor_parallel: float = 0.0
    """Share of the collectives of tensor parallelism that run in parts during the products."""
    scatters_transfers: bool = False
    """Whether each tensor-parallel rank sends only its part between stages (arXiv 2104.04473, section 4.1)."""
    overlaps_transfers: bool = False
    """Whether stages send micro-batches during computation (Megatron-Core)."""
    reduction_bytes: int | None = None
    """Bytes of an element in a gradient reduction; `None` for the engine's default."""
    reduces_to_owners: bool = False
    """Whether ZeRO-1 and ZeRO-2 reduce each gradient to the rank that updates it, as in the paper. DeepSpeed
    all-reduces complete buckets (`use_multi_rank_bucket_allreduce`, 0.19.8 stage_1_and_2.py:1695)."""
    sequence_parallel_norms: bool = False
    """Whether tensor parallelism also splits norms and residuals (Megatron's sequence parallelism)."""
    even_stages: bool = False
    """Whether pipeline stages have equally many layers (Megatron) instead of the fastest split."""
    update_bucket: int = 200_000_000
    """Elements per all-gather of updated parameters (`allgather_bucket_size`, by default 2e8)."""
    virtual_stages: int = 1
    """Stages per rank of an interleaved pipeline."""
    padded_vocabulary: int | None = None
    """Multiple to which the vocabulary is padded; `None` for no padding."""
    vocabulary_parallel: bool = False
    """Whether tensor parallelism splits embedding and head by vocabulary, including tied ones (Megatron)."""
    optimizer_ranks: int | None = None
    """Ranks that share the optimizer states, if not all of them (hierarchical ZeRO-1)."""
    selective_recomputation: bool = False
    """Whether only attention is recomputed (arXiv 2205.05198)."""
    float8: bool = False
    """Whether the products of the layers run in fp8, at twice the FLOP/s."""

    def __hash__(self) -> int:
        """Return a cheap hash, because software is the key of caches."""
        return hash((self.attention, self.loss_bytes, self.optimizer_bytes))


TRANSFORMERS = Software(
    attention="sdpa",
    elementwise=True,
    # Two norms and two residuals.
    hidden_bytes_forward=2 * 42.0 + 12.0,
    # Five gradients are added to others.
    hidden_bytes_backward=2 * 98.0 + 30.0,
    inner_bytes_forward=10.0,
    inner_bytes_backward=18.0,
    projected_bytes=52.0,
    normed_bytes_forward=42.0,
    normed_bytes_backward=98.0,
    loss_bytes=42.0,
    kernels_forward=45.0,
    kernels_backward=85.0,
    optimizer_bytes=44.0,
    copies_gathered=True,
    step_seconds=5e-3,
    micro_batch_seconds=2e-3,
)
"""Transformers 5 with eager RMSNorm in fp32, rotary embeddings, SDPA and SwiGLU: reads and writes of the operations
that autograd dispatches for a layer of `modeling_llama.py` and for its loss. Bytes of casts between types count 1.5
times, because casts reach 1,937 GB/s where other element-wise kernels reach 2,882 (docs/measurements/gpu.md)."""


COMPILED_TRAFFIC: Mapping[str, Any] = {
    "hidden_bytes_forward": 16.0,
    "hidden_bytes_backward": 28.0,
    "inner_bytes_forward": 6.0,
    "inner_bytes_backward": 10.0,
    "projected_bytes": 12.0,
    # A norm reads and writes 2 bytes, and reads 4 and writes 2 in the backward pass.
    "normed_bytes_forward": 4.0,
    "normed_bytes_backward": 6.0,
    "loss_bytes": 16.0,
    "kernels_forward": 15.0,
    "kernels_backward": 25.0,
}
"""What torch.compile changes: it fuses norms, residuals, rotary embeddings, activation and loss. Checked against
torchtitan's compiled steps (docs/measurements/step_time.md)."""

_LIGER_TRAFFIC: Mapping[str, Any] = {
    # A norm reads and writes 2 bytes, a residual 6; backward 6 and 6, and gradients of five products are added.
    "hidden_bytes_forward": 20.0,
    "hidden_bytes_backward": 42.0,
    "inner_bytes_forward": 6.0,
    "inner_bytes_backward": 10.0,
    # Rotated in place, both passes, besides the transposes.
    "projected_bytes": 24.0,
    "normed_bytes_forward": 4.0,
    "normed_bytes_backward": 6.0,
    "kernels_forward": 21.0,
    "kernels_backward": 45.0,
}
"""What Liger's kernels change, counted in liger-kernel 0.8.5 (ops/rms_norm.py, rope.py, swiglu.py, geglu.py)."""

_FLOAT8_TRAFFIC: Mapping[str, float] = {
    # Range (2 read) and cast (2 read, 1 written) of each input of a product, of its gradient, and of the input again.
    "hidden_bytes_forward": 10.0,
    "hidden_bytes_backward": 16.0,
    "inner_bytes_forward": 5.0,
    "inner_bytes_backward": 13.0,
    "projected_bytes": 18.0,
    "kernels_forward": 14.0,
    "kernels_backward": 24.0,
}
"""What dynamic scaling of torchao's `Float8Linear` adds; torch.compile fuses about half of it into other kernels."""


EAGER_ATTENTION = replace(TRANSFORMERS, attention="eager", score_bytes_forward=23.0, score_bytes_backward=31.0)
"""The same with `eager_attention_forward`: scale, mask, fp32 softmax and its cast back are separate kernels."""


FLASH_ATTENTION_2 = replace(TRANSFORMERS, attention="flash_attention_2", waits_in_layers=True)
"""The same with the `flash_attention_2` of Transformers."""

_OF_ATTENTION: Mapping[str, Software] = {
    "eager": EAGER_ATTENTION,
    "flash_attention_2": FLASH_ATTENTION_2,
    "flash_attention_3": replace(TRANSFORMERS, waits_in_layers=True),
}


def software_of(job: TrainingJob, *, attention: str | None = None) -> Software:
    """Return the software of a job and an attention implementation of Transformers."""
    software = _OF_ATTENTION.get(attention or "sdpa", TRANSFORMERS)
    if job.use_liger_kernel:
        software = replace(software, **_LIGER_TRAFFIC)
    if job.torch_compile:
        software = replace(software, **COMPILED_TRAFFIC)
    if job.precision == "fp8":
        part = 0.5 if job.torch_compile else 1.0
        added: dict[str, Any] = {
            name: getattr(software, name) + part * count for name, count in _FLOAT8_TRAFFIC.items()
        }
        software = replace(software, float8=True, **added)
    return software
