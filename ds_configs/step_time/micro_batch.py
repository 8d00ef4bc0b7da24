"""Time of one micro-batch in the layers and the head of a rank: products, attention, memory traffic, kernel launches.

A product of `[m, k] @ [k, n]` takes `2 (m + b)(n + b)(k + d) / (peak * efficiency)`: `b` rows and columns of
half-filled tiles and waves, `d` inner elements that fill and drain a tile's pipeline. So its efficiency falls with
small micro-batches and with tensor parallelism, smoothly, and more of any size never takes less time. What is bound by
memory takes its bytes over the bandwidth. Each kernel costs the device `kernel_seconds` and the host `launch_seconds`;
host and device meet in `(device^x + host^x)^(1/x)` (`constants.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, gcd

from ..specs.hardware import HardwareSpec
from ..specs.job import TrainingJob
from .constants import GpuConstants
from .model_work import ModelWork, Product
from .software import Software


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """The rates that a rank computes with."""

    flops_per_s: float
    """Matrix FLOP/s of large products in the job's precision."""
    attention_flops_per_s: float
    """FLOP/s of attention."""
    memory_bytes_per_s: float
    """What memory-bound operations reach."""
    layer_speedup: float
    """Factor of the products inside layers: 2 with fp8."""
    constants: GpuConstants
    """Everything else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Work that one micro-batch brings to a rank."""

    tokens: float
    """Tokens that the rank computes, sequences divided by sequence and context parallelism."""
    seq_len_tokens: int
    """Tokens of one whole sequence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """Seconds of a part of the model in one direction."""

    products: float = 0.0
    """Matrix products."""
    attention: float = 0.0
    """Scores, softmax and their product with the values."""
    memory: float = 0.0
    """Memory-bound operations, and the device's cost of starting kernels."""
    kernels: float = 0.0
    """Kernels that the host launches."""

    @property
    def device(self) -> float:
        """All seconds of the device."""
        return self.products + self.attention + self.memory


def device_of(hardware: HardwareSpec, job: TrainingJob, software: Software, constants: GpuConstants) -> Device:
    """Return the rates of an accelerator in the job's precision."""
    peak = hardware.flops_per_s * (constants.fp32_share if job.precision == "fp32" else 1.0)
    return Device(
        flops_per_s=peak * constants.matrix_efficiency,
        attention_flops_per_s=peak * constants.attention_efficiency,
        memory_bytes_per_s=hardware.memory_bytes_per_s * constants.memory_efficiency,
        layer_speedup=2.0 if software.float8 else 1.0,
        constants=constants,
    )


def product_seconds(device: Device, m: float, n: float, k: float, *, inside_layer: bool = True) -> float:
    """Return the seconds of an aligned `[m, k] @ [k, n]` (see the module's formula)."""
    border, depth = device.constants.product_border, device.constants.product_depth
    rate = device.flops_per_s * (device.layer_speedup if inside_layer else 1.0)
    return 2.0 * (m + border) * (n + border) * (k + depth) / rate


def alignment_efficiency(out_features: int, in_features: int, constants: GpuConstants) -> float:
    """Return the speed of a weight's three products, relative to one whose widths are multiples of 8 elements.

    Each of the three has rows of both widths, and a kernel reads 16 bytes at once, 8 elements, only where all rows
    begin at multiples of them. Otherwise it reads 4, 2 or 1, and each halving costs the same factor (NVIDIA, Matrix
    Multiplication Background User's Guide, has the steps).

    >>> from .constants import constants_of
    >>> [round(alignment_efficiency(rows, 1024, constants_of("A100-80GB")), 1) for rows in (50264, 50260, 50258, 50257)]
    [1.0, 0.7, 0.5, 0.4]
    """
    halvings = 4 - gcd(out_features, in_features, 8).bit_length()
    return float(constants.unaligned_efficiency ** (halvings / 3))


@lru_cache(maxsize=65536)
def layer_passes(
    work: ModelWork, batch: Batch, device: Device, software: Software, element_bytes: int, full: bool, quantized: bool
) -> tuple[Pass, Pass]:
    """Return one decoder layer, forward and backward.

    Args:
        work: The rank's part of the model.
        batch: The micro-batch.
        device: The rates.
        software: The stack.
        element_bytes: Bytes of an activation.
        full: Whether all weights are trained; frozen ones have no weight gradients.
        quantized: Whether frozen weights are expanded from 4 bit for each product.
    """
    forward = backward = 0.0
    for product in work.products:
        one, two = _both_ways(product, batch.tokens, device, full=full)
        forward, backward = forward + product.count * one, backward + product.count * two
    if work.expert_products:
        # Tokens of all ranks that share the experts meet on those that hold them, evenly.
        groups = work.num_experts / max(1, work.local_experts)
        each = batch.tokens * groups * work.experts_per_token / work.num_experts
        for product in work.expert_products:
            one, two = _both_ways(product, each, device, full=full)
            forward += work.local_experts * product.count * one
            backward += work.local_experts * product.count * two
    attention, again, scores = _attention(work, batch, device, software, element_bytes)
    width = element_bytes / 2
    divided = work.query_size / work.whole_query_size if software.sequence_parallel_norms else 1.0
    hidden = batch.tokens * work.hidden_size * divided * width
    inner = batch.tokens * work.inner_size * width
    projected = batch.tokens * (work.query_size + work.key_value_size) * software.projected_bytes * width / 2
    expanded = 2.5 * work.layer_parameters if quantized else 0.0
    constants = device.constants
    traffic = software.hidden_bytes_forward * hidden + software.inner_bytes_forward * inner + projected + expanded
    traffic += software.score_bytes_forward * scores * width
    traffic_back = software.hidden_bytes_backward * hidden + software.inner_bytes_backward * inner + projected
    traffic_back += software.score_bytes_backward * scores * width + expanded
    return (
        Pass(
            products=forward,
            attention=attention,
            memory=traffic / device.memory_bytes_per_s + software.kernels_forward * constants.kernel_seconds,
            kernels=software.kernels_forward,
        ),
        Pass(
            products=backward,
            attention=again,
            memory=traffic_back / device.memory_bytes_per_s + software.kernels_backward * constants.kernel_seconds,
            kernels=software.kernels_backward,
        ),
    )


def _both_ways(product: Product, tokens: float, device: Device, *, full: bool) -> tuple[float, float]:
    out, within, constants = product.out_features, product.in_features, device.constants
    forward = product_seconds(device, tokens, out, within)
    backward = product_seconds(device, tokens, within, out)
    if full:
        backward += product_seconds(device, out, within, tokens)
    efficiency = alignment_efficiency(out, within, constants)
    return forward / efficiency, backward * constants.backward_slowdown / efficiency


def _attention(
    work: ModelWork, batch: Batch, device: Device, software: Software, element_bytes: int
) -> tuple[float, float, float]:
    """Return the seconds of attention forward and backward, and the scores that eager attention writes.

    Two products of `2 * tokens * seen * query_size`; a fused kernel skips the half that a causal mask hides and
    recomputes the scores backward, five products in all (FlashAttention-2, arXiv 2307.08691, section 3.1).
    """
    seen = min(batch.seq_len_tokens, work.window or batch.seq_len_tokens)
    # Sequence parallelism divides the heads and context parallelism the tokens: `batch.tokens` holds either share.
    flops = 4.0 * batch.tokens * seen * work.query_size
    if software.attention == "fused":
        half = 0.5 if work.causal else 1.0
        forward = flops * half / device.attention_flops_per_s
        return forward, 2.5 * forward, 0.0
    heads = max(1, work.query_heads)
    width = work.query_size / heads
    border, depth = device.constants.product_border, device.constants.product_depth
    # Batched products with the width of a head inside, or outside, fill tiles only partly.
    inner = (width + depth) / width * (1 + border / seen) ** 2
    outer = (width + border) / width * (1 + border / seen) * (1 + depth / seen)
    forward = flops / 2 * (inner + outer) / device.flops_per_s
    scores = batch.tokens * seen * heads
    # A product with scores does few FLOPs for each of them: it is as slow as their way through memory, if that is
    # longer. Two products forward and four backward each read or write all scores once.
    moved = 2 * scores * element_bytes / device.memory_bytes_per_s
    return max(forward, moved), max(2 * forward, 2 * moved), scores


@lru_cache(maxsize=16384)
def head_passes(
    work: ModelWork, tokens: float, device: Device, software: Software, chunked: bool, full: bool
) -> tuple[Pass, Pass]:
    """Return embedding, final norm, output head and loss, forward and backward.

    A chunked loss (liger-kernel `fused_linear_cross_entropy.py`) never writes all logits, but takes them in chunks of
    about `tokens * hidden / vocabulary`, rounded up to a power of two, and adds each one's gradient to the head's.
    """
    rows = work.head_rows
    if not rows:
        return Pass(), Pass()
    if software.padded_vocabulary:
        rows = ceil(rows / software.padded_vocabulary) * software.padded_vocabulary
    constants, hidden = device.constants, work.hidden_size
    chunks, m = 1, tokens
    if chunked:
        wanted = max(1.0, tokens / ceil(rows / hidden))
        m = min(tokens, float(2 ** ceil(wanted).bit_length() if wanted > 1 else 1))
        chunks = ceil(tokens / m)

    times = chunks / alignment_efficiency(rows, hidden, constants)
    forward = times * product_seconds(device, m, rows, hidden, inside_layer=False)
    backward = times * product_seconds(device, m, hidden, rows, inside_layer=False)
    if full:
        backward += times * product_seconds(device, rows, hidden, m, inside_layer=False)
    backward *= constants.backward_slowdown
    logits = tokens * max(rows, work.gathered_vocabulary)
    bytes_of_loss = (software.loss_bytes / 2 if chunked else software.loss_bytes) * logits
    accumulated = 4.0 * rows * hidden * chunks if chunked and full else 0.0
    # Lookup of the embedding, final norm, and their gradients.
    around = tokens * hidden * (software.hidden_bytes_forward + software.hidden_bytes_backward) / 2
    traffic = bytes_of_loss + accumulated + around
    kernels = software.kernels_outside + 10 * (chunks - 1)
    memory = traffic / device.memory_bytes_per_s + kernels * constants.kernel_seconds
    return (
        Pass(products=forward, memory=memory / 2, kernels=kernels / 2),
        Pass(products=backward, memory=memory / 2, kernels=kernels / 2),
    )


def with_host(device_seconds: float, host_seconds: float, constants: GpuConstants) -> float:
    """Return the seconds of a micro-batch for which the host works while the device does: launches, hooks."""
    exponent = constants.host_exponent
    if host_seconds <= 0:
        return device_seconds
    return float((device_seconds**exponent + host_seconds**exponent) ** (1 / exponent))
