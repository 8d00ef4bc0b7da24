"""Matrix products of a model and the time of one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, gcd, prod

from ..memory.activations import chunked_loss_tokens
from ..memory.rank_parameters import expert_parallel_share, tensor_parallel_share
from ..models.images import image_sizes
from ..specs.hardware import HardwareSpec
from ..specs.images import EMBEDS_PATCHES, image_part
from ..specs.job import TrainingJob
from ..specs.layout import Layout
from ..specs.model import CONV1D_FAMILIES, Dimensions, ModelSpec
from .rates import GpuConstants, Software


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """A matrix product of each token with a weight, `[tokens, in_features] @ [in_features, out_features]`."""

    in_features: int
    out_features: int
    count: float = 1.0
    """Number of such products in an average layer."""

    @property
    def weight(self) -> int:
        return self.in_features * self.out_features


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModelWork:
    """One rank's part of a model under tensor and expert parallelism; compared by identity, as a cheap cache key."""

    products: tuple[Product, ...]
    """Dense products of an average decoder layer."""
    expert_products: tuple[Product, ...]
    """Products of one routed expert; empty in dense models."""
    local_experts: int
    """Routed experts of a layer on the rank."""
    whole: Dimensions
    """Dimensions of the whole model."""
    share: Dimensions
    """Dimensions of the rank's part, whose residual stream is not split."""
    inner_size: float
    """Width of the MLP on the rank, summed over the experts that a token visits."""
    head_rows: int
    """Columns of the output head on the rank; 0 without one."""
    gathered_vocabulary: int
    """Logits per token that tensor-parallel ranks gather, because AutoTP computes the complete loss on every rank."""
    norms_queries: bool
    """Whether queries and keys are normalized after their projections (Qwen3, OLMo 2, Gemma 3)."""
    window: int
    """Sliding window of attention in tokens; 0 without one."""
    causal: bool
    layer_tensors: float
    """Parameter tensors of an average layer."""
    layer_parameters: float
    """Parameters of an average layer on the rank."""
    outside_parameters: int
    """Parameters outside the layers on the rank: embeddings, final norm, head."""
    expert_parameters: float
    """Expert parameters of an average layer on the rank."""
    frozen_parameters: int = 0
    """Parameters of the parts of a model with images that are not trained."""


@lru_cache(maxsize=512)
def model_work(
    model: ModelSpec, tp: int = 1, ep: int = 1, *, divides_head: bool = True, vocabulary_parallel: bool = False
) -> ModelWork:
    """Return the work of one of `tp * ep` ranks.

    `divides_head` is false in pipelines (AutoTP). With `vocabulary_parallel`, embedding and head are split, tied or not
    (Megatron).
    """
    sizes, layers = model.dimensions, max(1, model.dimensions.num_layers)
    share = tensor_parallel_share(model, tp, divides_head=divides_head) if tp > 1 else model
    if ep > 1:
        share = expert_parallel_share(share, ep)
    flipped = model.model_type in CONV1D_FAMILIES
    inside = [parameter for parameter in share.parameters if parameter.in_layer]
    products, expert_products, local_experts = [], [], 0
    for parameter in inside:
        if model.reads_images and image_part(parameter.name):
            continue
        if parameter.kind == "experts":
            local_experts, out, within = parameter.shape
            expert_products.append(Product(in_features=within, out_features=out, count=parameter.count / layers))
        elif len(parameter.shape) == 2:
            out, within = reversed(parameter.shape) if flipped else parameter.shape
            products.append(Product(in_features=within, out_features=out, count=parameter.count / layers))
    # Columns of the output head on the rank; a head tied to the embedding is not split.
    own = next((p.shape[0] for p in share.parameters if p.group == "head" and len(p.shape) == 2), 0)
    is_tied = share.tied_embeddings and share.task != "encoder"
    head = own or (share.dimensions.vocab_size if is_tied else 0)
    outside = share.parameters_outside_layers
    if vocabulary_parallel and tp > 1:
        head, outside = -(-sizes.vocab_size // tp), -(-model.parameters_outside_layers // tp)
    # deepspeed 0.19.8, module_inject/auto_tp.py:467: an untied head is a column-parallel layer with gather_output.
    gathered = sizes.vocab_size if 0 < head < sizes.vocab_size and not vocabulary_parallel else 0
    experts = sum(parameter.total for parameter in inside if parameter.kind == "experts") / layers
    return ModelWork(
        products=tuple(products),
        expert_products=tuple(expert_products),
        local_experts=local_experts,
        whole=sizes,
        share=share.dimensions,
        inner_size=share.dimensions.intermediate_size + sizes.experts_per_token * sizes.expert_intermediate_size,
        head_rows=head,
        gathered_vocabulary=gathered,
        norms_queries=any(parameter.name.endswith(("q_norm.weight", "q_layernorm.weight")) for parameter in inside),
        window=model.sliding_window or 0,
        causal=model.task == "causal_lm",
        layer_tensors=sum(parameter.count for parameter in inside) / layers,
        layer_parameters=sum(parameter.total for parameter in inside) / layers,
        outside_parameters=outside,
        expert_parameters=experts,
        frozen_parameters=sum(parameter.total for parameter in share.parameters if parameter.frozen),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """Rates of a rank's accelerator."""

    flops_per_s: float
    """Matrix FLOP/s of large products in the job's precision."""
    attention_flops_per_s: float
    """FLOP/s of fused attention, of long sequences."""
    narrow_attention: float
    """Speed of heads of 64 or less, relative to wider ones."""
    attention_half_tokens: float
    """Tokens of a sequence with which attention reaches half of these FLOP/s."""
    memory_bytes_per_s: float
    """Bandwidth that memory-bound operations reach."""
    elementwise_bytes_per_s: float
    """Bandwidth that norms, activation functions, rotary embeddings and the loss reach."""
    layer_speedup: float
    """Speed-up of products inside layers: 2 with fp8."""
    constants: GpuConstants


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInputs:
    """What every part of a step's time depends on."""

    layout: Layout
    model: ModelSpec
    hardware: HardwareSpec
    job: TrainingJob
    software: Software
    constants: GpuConstants
    device: Device
    work: ModelWork
    tokens: float
    """Of a micro-batch on a rank, with sequences split by sequence and context parallelism."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """Seconds of a part of the model in one direction."""

    products: float = 0.0
    grouped: float = 0.0
    """Part of the products that grouped kernels of experts compute."""
    attention: float = 0.0
    memory: float = 0.0
    """Memory-bound operations, and the device time to start kernels."""
    kernels: float = 0.0

    @property
    def device(self) -> float:
        return self.products + self.attention + self.memory


@lru_cache(maxsize=256)
def device_of(hardware: HardwareSpec, job: TrainingJob, software: Software, constants: GpuConstants) -> Device:
    """Return the rates of an accelerator in the job's precision."""
    peak, efficiency = hardware.flops_per_s, constants.matrix_efficiency
    attention = hardware.attention_flops_per_s
    if job.precision == "fp32":
        attention = hardware.fp32_attention_flops_per_s
        peak, efficiency = hardware.fp32_flops_per_s or peak * constants.fp32_share, constants.fp32_efficiency
    attention_efficiency, narrow, half_tokens = constants.attention_efficiency, 1.0, 0.0
    if (
        software.attention in ("sdpa", "flash_attention_2")
        and job.precision != "fp32"
        and constants.sdpa_efficiency
        and not attention
    ):
        attention_efficiency, half_tokens = constants.sdpa_efficiency, constants.sdpa_half_tokens
        narrow = constants.sdpa_narrow_efficiency / attention_efficiency
        if software.attention == "flash_attention_2" and constants.flash_efficiency:
            attention_efficiency, half_tokens = constants.flash_efficiency, constants.flash_half_tokens
    return Device(
        flops_per_s=peak * efficiency,
        attention_flops_per_s=attention or peak * attention_efficiency,
        narrow_attention=narrow,
        attention_half_tokens=half_tokens,
        memory_bytes_per_s=hardware.memory_bytes_per_s * constants.memory_efficiency,
        elementwise_bytes_per_s=hardware.memory_bytes_per_s
        * (constants.elementwise_efficiency if software.elementwise else constants.memory_efficiency),
        layer_speedup=2.0 if software.float8 else 1.0,
        constants=constants,
    )


def product_seconds(device: Device, m: float, n: float, k: float, *, inside_layer: bool = True) -> float:
    """Return the seconds of an aligned `[m, k] @ [k, n]`: `2 (m + border) (n + border) (k + depth) / rate`."""
    border, depth = device.constants.product_border, device.constants.product_depth
    rate = device.flops_per_s * (device.layer_speedup if inside_layer else 1.0)
    return 2.0 * (m + border) * (n + border) * (k + depth) / rate


def alignment_efficiency(out_features: int, in_features: int, constants: GpuConstants) -> float:
    """Return the speed of a weight's three products, relative to one whose widths are multiples of 8 elements.

    A kernel reads 16 bytes (8 elements) per instruction only if all rows start at multiples of 8 elements. Otherwise it
    reads 4, 2 or 1 elements, and each halving costs the same factor (NVIDIA, Matrix Multiplication Background User's
    Guide).

    >>> from .rates import constants_of
    >>> [round(alignment_efficiency(rows, 1024, constants_of("A100-80GB")), 1) for rows in (50264, 50260, 50258, 50257)]
    [1.0, 0.7, 0.5, 0.4]
    """
    halvings = 4 - gcd(out_features, in_features, 8).bit_length()
    return float(constants.unaligned_efficiency ** (halvings / 3))


@lru_cache(maxsize=65536)
def layer_passes(
    work: ModelWork,
    tokens: float,
    seq_len_tokens: int,
    device: Device,
    software: Software,
    element_bytes: int,
    full: bool,
    quantized: bool,
) -> tuple[Pass, Pass]:
    """Return the forward and backward pass of one decoder layer.

    `tokens` are those that a rank computes, with sequences split by sequence and context parallelism.
    """
    forward = backward = grouped = grouped_back = 0.0
    for product in work.products:
        ahead, back = _both_passes(product, tokens, device, full=full)
        forward, backward = forward + product.count * ahead, backward + product.count * back
    if work.expert_products:
        # Tokens of all expert-parallel ranks are spread evenly over the experts.
        groups = work.whole.num_experts / max(1, work.local_experts)
        tokens_per_expert = tokens * groups * work.whole.experts_per_token / work.whole.num_experts
        for product in work.expert_products:
            ahead, back = _expert_passes(product, tokens_per_expert, device, element_bytes, full=full)
            grouped += work.local_experts * product.count * ahead
            grouped_back += work.local_experts * product.count * back
    attention, attention_back, scores = _attention(work, tokens, seq_len_tokens, device, software, element_bytes)
    width = element_bytes / 2
    divided = work.share.query_size / work.whole.query_size if software.sequence_parallel_norms else 1.0
    hidden = tokens * work.whole.hidden_size * divided * width
    inner = tokens * work.inner_size * width
    projected = tokens * (work.share.query_size + work.share.key_value_size) * width
    of_norms = (software.normed_bytes_forward, software.normed_bytes_backward) if work.norms_queries else (0.0, 0.0)
    of_projected, of_projected_back = (software.projected_bytes / 2 + of_norm for of_norm in of_norms)
    expanded = 2.5 * work.layer_parameters if quantized else 0.0
    constants = device.constants
    traffic = software.hidden_bytes_forward * hidden + software.inner_bytes_forward * inner + expanded
    traffic += software.score_bytes_forward * scores * width + of_projected * projected
    traffic_back = software.hidden_bytes_backward * hidden + software.inner_bytes_backward * inner
    traffic_back += software.score_bytes_backward * scores * width + of_projected_back * projected + expanded
    kernels, kernels_back = software.kernels_forward, software.kernels_backward
    memory, memory_back = traffic / device.elementwise_bytes_per_s, traffic_back / device.elementwise_bytes_per_s
    if work.expert_products:
        sizes, rows = work.whole, tokens * work.whole.experts_per_token * width
        of_experts, of_experts_back = (
            rows * (of_hidden * sizes.hidden_size + of_inner * sizes.expert_intermediate_size)
            for of_hidden, of_inner in zip(_ROUTED_HIDDEN_BYTES, _ROUTED_INNER_BYTES, strict=True)
        )
        memory += of_experts / device.memory_bytes_per_s
        memory_back += of_experts_back / device.memory_bytes_per_s
        kernels, kernels_back = kernels + _ROUTED_KERNELS[0], kernels_back + _ROUTED_KERNELS[1]
    return (
        Pass(
            products=forward + grouped,
            grouped=grouped,
            attention=attention,
            memory=memory + kernels * constants.kernel_seconds,
            kernels=kernels,
        ),
        Pass(
            products=backward + grouped_back,
            grouped=grouped_back,
            attention=attention_back,
            memory=memory_back + kernels_back * constants.kernel_seconds,
            kernels=kernels_back,
        ),
    )


def before_attention(step: StepInputs) -> Pass:
    """Return the part of a layer's forward pass before attention: a norm, projections and rotary embeddings."""
    work, software, width = step.work, step.software, step.job.compute_bytes / 2
    sizes, hidden = work.share, work.whole.hidden_size
    of_norms = software.normed_bytes_forward if work.norms_queries else 0.0
    traffic = hidden * software.hidden_bytes_forward / 2
    traffic += (sizes.query_size + sizes.key_value_size) * (software.projected_bytes / 2 + of_norms)
    return Pass(
        products=product_seconds(step.device, step.tokens, sizes.query_size + 2 * sizes.key_value_size, hidden),
        memory=step.tokens * width * traffic / step.device.elementwise_bytes_per_s,
        kernels=software.kernels_forward / 2,
    )


# What a layer of experts does beside its products, in the forward and in the backward pass: counted in
# `grouped_mm_experts_forward` (transformers 5.17.0, integrations/moe.py) and the derivatives of its operations.
_ROUTED_HIDDEN_BYTES = 22, 35
"""Memory traffic per token, expert that it visits and element of the hidden size, with rows in 16 bit.

Forward, rows are gathered in the order of their experts (read and written, 4 bytes), masked (4), masked after the
second product (4), weighted (4), put in the order of tokens (4) and summed (2). Backward, the sum's gradient is copied
for each expert (4) and added to zeros at permuted rows (8). Weighting has a gradient of the rows (4) and one of the
weights (8). Two masks take 8, and adding rows to their tokens' gradients takes 3.
"""
_ROUTED_INNER_BYTES = 8, 16
"""The same per element of an expert's width, beside the activation function: the output of the first product, twice as
wide, is masked (8); gradients of its halves are joined (8) and masked (8)."""
_ROUTED_KERNELS = 40, 50
"""Kernels of a layer: router, sort, offsets, masks, permutations and sum."""


def tower_passes(step: StepInputs) -> tuple[Pass, Pass]:
    """Return the passes of vision tower and projector over the images of a micro-batch; empty without images.

    Rows of the tower are patches, those of the projector features. Attention is that of each image, or of each window
    in layers with windows. What is frozen, with nothing trained before it, has no backward pass.
    """
    model, job, device = step.model, step.job, step.device
    images = image_sizes(model, job)
    if images is None:
        return Pass(), Pass()
    sequences, settings = step.layout.micro_batch_size, dict(model.settings)
    seconds, traffic = {"forward": 0.0, "backward": 0.0}, {"forward": 0.0, "backward": 0.0}
    tower = [p for p in model.parameters if p.in_layer and image_part(p.name) == "vision_tower"]
    is_trained, blocks = any(not p.frozen for p in tower), max((p.count for p in tower), default=0)
    width = next((p.shape[-1] for p in tower if p.kind == "linear" and len(p.shape) == 2), 0)
    for parameter in model.parameters:
        part = image_part(parameter.name)
        is_product = parameter.kind == "linear" or EMBEDS_PATCHES.search(parameter.name)
        if part is None or len(parameter.shape) < 2 or not is_product:
            continue
        out, within = parameter.shape[0], prod(parameter.shape[1:])
        rows = sequences * (images.patches if part == "vision_tower" else images.tokens)
        full = not parameter.frozen and (job.method == "full" or parameter.whole)
        ahead, back = _both_passes(Product(in_features=within, out_features=out), rows, device, full=full)
        seconds["forward"] += parameter.count * ahead
        moved = parameter.count * rows * (out + within) * job.compute_bytes
        traffic["forward"] += moved
        if not parameter.frozen or (part == "projector" and is_trained):
            seconds["backward"] += parameter.count * back
            traffic["backward"] += 2 * moved
    # Scores and values: 4 * patches * (patches that each attends to) * width.
    seen = images.patches / max(1, images.images)
    window = int(settings.get("vision_config.window_size", 0))
    full_layers = blocks
    if window:
        # Qwen2.5-VL: every eighth layer has full attention (`fullatt_block_indexes`).
        full_layers = -(-blocks // _FULL_ATTENTION_EVERY)
    in_window = min(seen, (window / int(settings.get("vision_config.patch_size", 14))) ** 2) if window else seen
    flops = 4.0 * sequences * images.patches * width * (full_layers * seen + (blocks - full_layers) * in_window)
    attention = flops / device.attention_flops_per_s
    rate, kernels = device.memory_bytes_per_s, step.software.kernels_forward * blocks
    return (
        Pass(products=seconds["forward"], attention=attention, memory=traffic["forward"] / rate, kernels=kernels),
        Pass(
            products=seconds["backward"],
            attention=2.5 * attention if is_trained else 0.0,
            memory=traffic["backward"] / rate,
            kernels=step.software.kernels_backward * blocks if is_trained else 0.0,
        ),
    )


_FULL_ATTENTION_EVERY = 8


def _both_passes(product: Product, tokens: float, device: Device, *, full: bool) -> tuple[float, float]:
    out, within, constants = product.out_features, product.in_features, device.constants
    forward = product_seconds(device, tokens, out, within)
    backward = product_seconds(device, tokens, within, out)
    if full:
        backward += product_seconds(device, out, within, tokens)
    efficiency = alignment_efficiency(out, within, constants)
    return forward / efficiency, backward * constants.backward_slowdown / efficiency


def _expert_passes(
    product: Product, tokens: float, device: Device, element_bytes: int, *, full: bool
) -> tuple[float, float]:
    """Return the seconds of one expert's products in a grouped kernel, forward and backward.

    A group is filled to complete tiles (`GpuConstants.group_rows`), half of one being empty on average. With few
    tokens, reading the weights takes longer than multiplying, and so does writing their gradients.
    """
    out, within, constants = product.out_features, product.in_features, device.constants
    filled = constants.group_rows / (1 if tokens > 128 else 2)
    empty = max(0.0, filled / 2 - constants.product_border)
    moved = element_bytes * (out * within + tokens * (out + within)) / device.memory_bytes_per_s
    forward = max(moved, product_seconds(device, tokens + empty, out, within))
    backward = max(moved, constants.backward_slowdown * product_seconds(device, tokens + empty, within, out))
    if full:
        backward += max(moved, constants.backward_slowdown * product_seconds(device, out, within, tokens))
    return forward, backward


def _attention(
    work: ModelWork, tokens: float, seq_len_tokens: int, device: Device, software: Software, element_bytes: int
) -> tuple[float, float, float]:
    """Return the seconds of attention forward and backward, and the number of scores that eager attention writes.

    Two products of `2 * tokens * seen * query_size`. A fused kernel skips the masked half of causal scores and
    recomputes scores in the backward pass, which has five products (FlashAttention-2, arXiv 2307.08691, section 3.1).
    """
    seen = min(seq_len_tokens, work.window or seq_len_tokens)
    # Sequence parallelism splits the heads and context parallelism the tokens; `tokens` is split by both.
    flops = 4.0 * tokens * seen * work.share.query_size
    heads = max(1, work.share.num_attention_heads)
    width = work.share.query_size / heads
    if software.attention != "eager":
        half = 0.5 if work.causal else 1.0
        rate = device.attention_flops_per_s * (device.narrow_attention if width <= 64 else 1.0)
        forward = flops * half * (1 + device.attention_half_tokens / seen) / rate
        return forward, 2.5 * forward, 0.0
    border, depth = device.constants.product_border, device.constants.product_depth
    # Batched products with the width of a head as inner or outer dimension fill tiles only partly.
    inner = (width + depth) / width * (1 + border / seen) ** 2
    outer = (width + border) / width * (1 + border / seen) * (1 + depth / seen)
    forward = flops / 2 * (inner + outer) / device.flops_per_s
    scores = tokens * seen * heads
    # A product with scores has few FLOPs per score, so it can be limited by memory bandwidth. Two products forward and
    # four backward each read or write all scores once.
    moved = 2 * scores * element_bytes / device.memory_bytes_per_s
    return max(forward, moved), max(2 * forward, 2 * moved), scores


@lru_cache(maxsize=16384)
def head_passes(
    work: ModelWork, tokens: float, device: Device, software: Software, chunked: bool, full: bool
) -> tuple[Pass, Pass]:
    """Return the forward and backward pass of embedding, final norm, output head and loss.

    A chunked loss adds the gradient of each chunk of tokens to the head's.
    """
    rows = work.head_rows
    if not rows:
        return Pass(), Pass()
    if software.padded_vocabulary:
        rows = ceil(rows / software.padded_vocabulary) * software.padded_vocabulary
    constants, hidden = device.constants, work.whole.hidden_size
    chunks, m = 1, tokens
    if chunked:
        m = min(tokens, chunked_loss_tokens(ceil(tokens), rows, hidden))
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
    traffic = (bytes_of_loss + around) / device.elementwise_bytes_per_s + accumulated / device.memory_bytes_per_s
    kernels = software.kernels_outside + 10 * (chunks - 1)
    memory = traffic + kernels * constants.kernel_seconds
    return (
        Pass(products=forward, memory=memory / 2, kernels=kernels / 2),
        Pass(products=backward, memory=memory / 2, kernels=kernels / 2),
    )


def with_host(device_seconds: float, host_seconds: float, constants: GpuConstants) -> float:
    """Return the seconds of a micro-batch during which the device computes and the host launches kernels and hooks."""
    exponent = constants.host_exponent
    if host_seconds <= 0:
        return device_seconds
    return float((device_seconds**exponent + host_seconds**exponent) ** (1 / exponent))
