"""Activation bytes: stored coefficients by family and kind of layer, or an upper bound from the model's structure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, prod
from typing import Any, Literal

from ..models.images import image_sizes
from ..specs.errors import ConfigError, UsageError
from ..specs.images import EMBEDS_PATCHES, ImageSizes, image_part
from ..specs.job import TrainingJob
from ..specs.layout import Layout
from ..specs.model import (
    ALL_LINEAR,
    CONV1D_FAMILIES,
    Dimensions,
    ModelSpec,
    ParameterShape,
    adapted_experts,
    has_liger_loss,
    merged,
    stored_facts,
    targeted_linears,
)

Mode = Literal["bf16", "fp32", "bf16_autocast"]
Adapter = Literal[
    "none",
    "lora_all_linear",
    "lora_attention",
    "lora_experts",
    "frozen_tower",
    "none_liger",
    "lora_language",
    "lora_full_tower",
]
"""What is trained: everything, adapters, or, of a model that reads images, the language model or its adapters alone."""
_FULL: tuple[Adapter, ...] = ("none", "frozen_tower", "none_liger")
Attention = Literal["auto", "fused", "masked", "math", "eager"]
Kernels = Literal["eager", "liger", "compiled"]

DATA_FILE = "activations.json"
ADDED_FILE = "added_activations.json"
"""Families added by `tools/add_family.py`, with the same structure."""
KERNELS_FILE = "kernel_activations.json"
"""Coefficients of layers with other kernels in full training, by kernels, family, mode and attention."""


Parts = tuple[tuple[int, int], ...]
"""A pair of bytes for each moment at which a layer may peak: all but the MLP's inner tensors, and the inner tensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MlpBytes:
    """Bytes of a layer with its MLP's inner tensors apart, of which a tiled MLP has one tile's.

    A tiled MLP saves its input only, which other layers save too, and adds the gradient of its input, into which the
    tiles write (plugins/transformers/tiled_compute.py).
    """

    saved_bytes_per_layer: int
    """Inner tensors that a layer without checkpointing keeps."""
    input_gradient_bytes: int
    backward_transient: Parts
    recompute_backward_transient: Parts
    recompute_beside_attention: Parts
    forward_transient: Parts

    def tiled(self, parts: Parts, share: float, *, backward: bool) -> int:
        """Return the largest bytes of a moment if tiles have `share` of the tokens.

        A moment at which at most half of the inner tensors exist is after the backward pass of the first matrices. Its
        bytes already contain the gradient of the input for all tokens.
        """
        most, added = max((inner for _, inner in parts), default=0), self.input_gradient_bytes if backward else 0
        return max(
            0, *(outside + ceil(max(0, inner) * share) + (added if 2 * inner > most else 0) for outside, inner in parts)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationEstimate:
    """Activation bytes on one rank, without parameters, gradients and optimizer state.

    With `n` layers the peaks of one micro-batch are `n * per_layer + outside_layer_bytes` plus the larger of the loss
    peak and the transient; `per_layer` is `saved_bytes_per_layer` or, with checkpointing,
    `checkpointed_bytes_per_layer`.
    """

    saved_bytes_per_layer: int
    """Kept from forward to backward by one layer without checkpointing."""
    checkpointed_bytes_per_layer: int
    """Kept by one layer with checkpointing: the layer's input."""
    outside_layer_bytes: int
    """Live outside the layers when the output head starts: rotary tables, masks, embedding output, final norm."""
    backward_transient_bytes: int
    """Largest live bytes in the last layer's backward beyond all layers' saved bytes and `outside_layer_bytes`."""
    recompute_backward_transient_bytes: int
    """The same with checkpointing, which also holds the recomputed layer's saved tensors."""
    first_layer_bytes: int = 0
    """The first layer's backward transient minus `backward_transient_bytes`; negative if it needs less."""
    recompute_first_layer_bytes: int = 0
    """The same with checkpointing."""
    forward_transient_bytes: int
    """Largest live bytes in one checkpointed layer's forward beyond those live when it starts."""
    attention_forward_bytes: int | None = None
    """Like `forward_transient_bytes`, while a fused kernel computes attention; `None` if unknown."""
    attention_backward_bytes: int | None = None
    """Like `backward_transient_bytes`, while it computes the gradients of attention."""
    recompute_attention_backward_bytes: int | None = None
    """The same with checkpointing."""
    recompute_beside_attention_bytes: int | None = None
    """The largest of `recompute_backward_transient_bytes` while all that attention keeps is live; `None` if unknown."""
    loss_tiles: int = 0
    """Tiles of the tiled loss, whose backward pass computes them again; 0 for other losses."""
    tower_saved_bytes: int = 0
    """Kept by all layers of a trained vision tower without checkpointing; its transients are part of those above."""
    tower_checkpointed_bytes: int = 0
    """The same with checkpointing."""
    mlp: MlpBytes | None = None
    """The part of the above that MLPs hold; `None` if the source does not separate it."""
    loss_forward_peak_bytes: int
    """Largest live bytes from the output head to the end of the loss, beyond what the layers and `outside` keep."""
    loss_backward_peak_bytes: int
    """Largest live bytes in the backward of loss, head and final norm, counted like the forward peak."""
    autocast_weight_copy_bytes_per_parameter: int
    """Bytes of the cached half-precision copy of each float32 matrix that a linear layer uses; 0 without autocast."""
    is_bound: bool = False
    """Whether this is an upper bound from the model's structure, because nothing is stored."""


def size_factors(
    dimensions: Dimensions, *, micro_batch_size: int, seq_len_tokens: int, lora_rank: int = 0
) -> dict[str, int]:
    """Return the sizes whose products are the features in which activation bytes are linear, by name.

    `sequence` counts sequences, `position` the tokens of one, whatever the batch, and `token` all tokens.
    """
    tokens = micro_batch_size * seq_len_tokens
    return {
        "hidden_size": dimensions.hidden_size,
        "query_size": dimensions.query_size,
        "key_value_size": dimensions.key_value_size,
        "intermediate_size": dimensions.intermediate_size,
        "attention_heads": dimensions.num_attention_heads,
        "key_value_heads": dimensions.num_key_value_heads,
        "head_dim": dimensions.head_dim,
        "vocab_size": dimensions.vocab_size,
        "expert": dimensions.num_experts,
        "experts": dimensions.num_experts,
        "experts_per_token": dimensions.experts_per_token,
        "expert_intermediate_size": dimensions.expert_intermediate_size,
        "constant": 1,
        "sequence": micro_batch_size,
        "position": seq_len_tokens,
        "token": tokens,
        "routed_token": tokens * dimensions.experts_per_token,
        "attention_mask": tokens * seq_len_tokens,
        "attention_scores": tokens * seq_len_tokens * dimensions.num_attention_heads,
        "lora_rank": lora_rank,
    }


def feature(name: str, factors: Mapping[str, int]) -> int:
    """Return the value of one feature, the product of the sizes in its name.

    >>> feature("token*hidden_size", {"token": 4096, "hidden_size": 64})
    262144
    """
    return prod(factors.get(factor, 0) for factor in name.split("*"))


@lru_cache(maxsize=16)
def load_coefficients(release: str) -> Mapping[str, Any]:
    """Return the traced `versions` and the `tables` of a release of Transformers.

    Tables are keyed by family, mode, adapter and attention.
    """
    first, added = (stored_facts(name, release) for name in (DATA_FILE, ADDED_FILE))
    return {"versions": first["versions"], "tables": first["tables"] | added["tables"]}


def _evaluated(
    table: Mapping[str, Any],
    point: Sequence[int],
    counts: dict[str, int],
    *,
    layers: int,
    interleaved: bool = False,
    tower: Collection[str] = (),
) -> ActivationEstimate:
    """Return the bytes of a coefficient table for layers of several kinds, summed and spread evenly over `layers`.

    Kinds of a vision `tower` are summed apart. Each quantity is the largest of its rows, `sum(coefficient * feature)`.
    `counts` has the layers of each kind in execution order; a table with a single kind has its rows without a name.
    """

    def of_layer(name: str, kind: str) -> int:
        return _largest(table[name][kind] if kind else table[name], point)

    saved = {kind: of_layer("saved_per_layer", kind) for kind in counts}
    checkpointed = {kind: of_layer("checkpointed_per_layer", kind) for kind in counts}

    def transient(name: str, layer_bytes: Mapping[str, int]) -> int:
        # When the last layer of a kind runs, the tensors of layers after it are freed, or not allocated yet.
        peaks, later = [0], 0
        text = sum(count * layer_bytes[kind] for kind, count in counts.items() if kind not in tower)
        for kind in reversed(counts):
            later = max(later, text if kind in tower else 0)
            if counts[kind]:
                peaks.append(of_layer(name, kind) - later)
                later += (1 if interleaved else counts[kind]) * layer_bytes[kind]
        return max(peaks)

    def together(of_layer: Mapping[str, int], *, in_tower: bool) -> int:
        return sum(count * of_layer[kind] for kind, count in counts.items() if (kind in tower) == in_tower)

    first = next((kind for kind, count in counts.items() if count and kind not in tower), next(iter(counts)))
    largest = transient("backward_transient", saved)
    recomputed = transient("recompute_backward_transient", checkpointed)
    outside = _largest(table["outside_layers"], point)
    # What checkpointing changes outside is that of the tower.
    more = _largest(table.get("checkpointed_outside_layers", table["outside_layers"]), point) - outside
    return ActivationEstimate(
        saved_bytes_per_layer=-(-together(saved, in_tower=False) // layers),
        checkpointed_bytes_per_layer=-(-together(checkpointed, in_tower=False) // layers),
        tower_saved_bytes=together(saved, in_tower=True),
        tower_checkpointed_bytes=together(checkpointed, in_tower=True) + more,
        outside_layer_bytes=outside,
        backward_transient_bytes=largest,
        recompute_backward_transient_bytes=recomputed,
        first_layer_bytes=of_layer("backward_transient", first) - largest,
        recompute_first_layer_bytes=of_layer("recompute_backward_transient", first) - recomputed,
        forward_transient_bytes=transient("forward_transient", checkpointed),
        loss_forward_peak_bytes=_largest(table["loss_forward_peak"], point),
        loss_backward_peak_bytes=_largest(table["loss_backward_peak"], point),
        autocast_weight_copy_bytes_per_parameter=int(table["weight_copy_bytes_per_parameter"]),
    )


def _with_parts(estimate: ActivationEstimate, table: Mapping[str, Any], point: Sequence[int]) -> ActivationEstimate:
    """Return the bytes of a family's layers with those while attention runs, and those of the MLP apart."""
    (saved_row,) = table["saved_per_layer"]
    names, copies = table["features"], estimate.autocast_weight_copy_bytes_per_parameter
    element = copies or max(row[names.index("token*hidden_size")] for row in table["checkpointed_per_layer"])
    saved = dict(zip(names, saved_row, strict=True))
    heads, queries, keys = (f"token*{size}" for size in ("attention_heads", "query_size", "key_value_size"))

    def in_attention(name: str, needed: Mapping[str, float], kept: Mapping[str, float]) -> int | None:
        rows = [dict(zip(names, row, strict=True)) for row in table[name]]
        during = [r for r in rows if all(r.get(size, 0) + kept.get(size, 0) >= n for size, n in needed.items())]
        return _largest([list(row.values()) for row in during], point) if during else None

    keeping = {size: saved.get(size, 0) for size in (queries, keys, heads)}
    # A fused kernel's forward pass ends with queries, keys, values, outputs and the sums of scores. Its backward pass
    # ends with the gradients of the first four besides what the layer keeps, less a copy of outputs for the projection.
    computed = {queries: 2 * element, keys: 2 * element, heads: 4}
    gradients = {
        queries: saved.get(queries, 0) + element,
        keys: saved.get(keys, 0) + 2 * element,
        heads: max(4, saved[heads]),
    }
    return replace(
        estimate,
        attention_forward_bytes=in_attention("forward_transient", computed, {}),
        attention_backward_bytes=in_attention("backward_transient", gradients, saved),
        recompute_attention_backward_bytes=in_attention("recompute_backward_transient", gradients, {}),
        recompute_beside_attention_bytes=in_attention("recompute_backward_transient", keeping, {}),
        mlp=_mlp_bytes(table, point),
    )


def with_attention(
    traced: ActivationEstimate, dimensions: Dimensions, tokens: int, *, layout: Layout, element: int, on_gpu: bool
) -> ActivationEstimate:
    """Return the bytes with what attention allocates besides traced operators, which lives while it is computed.

    On an accelerator, the backward pass of 16-bit kernels sums the gradients of queries in fp32 and has 4 bytes for a
    head. With grouped keys and values it computes their gradients for every query head. Sources: FlashAttention-2
    (csrc/flash_attn/flash_api.cpp, `mha_bwd`); measured on an H100 for that of PyTorch and for cuDNN's
    (docs/measurements/gpu.md).

    Context parallelism has the buffers of ring attention (torch 2.13.0, `_context_parallel/_attention.py`), here for
    its default `cp_comm_strategy: allgather`. Without a traced moment of attention they are added to the largest one.
    Sequence parallelism exchanges heads for tokens in further copies (DeepSpeed's `ulysses_sp.py`).
    `tokens` are those of complete sequences; bytes are divided by the ranks that share a sequence later.
    """
    size, cp = dimensions, layout.cp
    query, pair = element * tokens * size.query_size, 2 * element * tokens * size.key_value_size
    grouped = size.num_key_value_heads < size.num_attention_heads
    # Gradients of queries in fp32, and those of keys and values for every query head.
    summed, repeated = (4 * tokens * size.query_size, 2 * query) if on_gpu and element == 2 else (0, 0)
    repeated *= grouped
    heads = 4 * tokens * size.num_attention_heads
    forward, backward = 0, summed + repeated + (heads if summed else 0)
    if cp > 1:
        merged, gathered = 4 * tokens * size.query_size, cp * pair
        copy, pair_gradients = (merged if element == 2 else 0), 8 * tokens * size.key_value_size
        # The first block has contiguous keys and values and their copy for the gather. Merging a later one has the
        # outputs so far, the block's, and two temporaries (`_SDPAMerger`).
        forward = gathered + copy + max(2 * pair, 3 * merged + 2 * heads)
        # Always: fp32 gradients of queries, gathered and last sent pairs. In a later block: fp32 gradients of pairs,
        # their copy to send and the received ones, and the last block's gradients beside this one's, which reads half
        # of the keys and values.
        always = gathered + merged + pair
        backward = always + max(
            3 * pair_gradients + query + pair // 2 + summed + repeated // 2 + (heads if summed else 0),
            # Received, updated, copied and sent gradients of pairs, when the kernel has ended.
            4 * pair_gradients - pair // 2,
            # A rank whose second half of queries alone is computed updates their gradients in a copy.
            3 * pair_gradients + merged - query // 2,
        )

    def during(moment: int | None, largest: int, added: int) -> int:
        if moment is None:
            return largest + (added if cp > 1 else 0)
        return max(largest, moment + added)

    # The output projection keeps the outputs in another order than attention: a rank of a ring updates half of them in
    # torch's order, and heads are exchanged. Fewer heads of keys than ranks are repeated (ulysses_sp.py:147).
    reordered = query if cp > 1 or layout.sp > 1 else 0
    repeats = max(1, layout.sp // max(1, size.num_key_value_heads)) - 1
    reordered += repeats * pair
    in_backward = traced.attention_backward_bytes
    mlp = traced.mlp
    if mlp is not None:
        beside_attention = tuple((outside + reordered, inner) for outside, inner in mlp.recompute_beside_attention)
        mlp = replace(mlp, recompute_backward_transient=mlp.recompute_backward_transient + beside_attention)
    largest, beside = traced.recompute_backward_transient_bytes, traced.recompute_beside_attention_bytes
    recomputed = during(
        traced.recompute_attention_backward_bytes,
        max(largest, (largest if beside is None else beside) + reordered),
        backward + repeats * pair,
    )
    if layout.sp > 1 and traced.recompute_attention_backward_bytes is not None:
        # The model's queries, keys and values, and outputs in four orders; several sequences have one more.
        # need. When a layer runs again, there are no gradients of attention yet, but its input, of which 16-bit norms
        # keep a copy.
        orders = 4 + (layout.micro_batch_size > 1)
        forward = orders * query + (1 + repeats) * pair
        forward += element * tokens * size.hidden_size if element == 2 else 0
        recomputed = max(recomputed, traced.recompute_attention_backward_bytes - 2 * query - pair + forward)
    return replace(
        traced,
        saved_bytes_per_layer=traced.saved_bytes_per_layer + reordered,
        forward_transient_bytes=during(traced.attention_forward_bytes, traced.forward_transient_bytes, forward),
        backward_transient_bytes=during(
            None if in_backward is None else in_backward - reordered, traced.backward_transient_bytes, backward
        ),
        recompute_backward_transient_bytes=recomputed,
        mlp=mlp,
    )


def _mlp_bytes(table: Mapping[str, Any], point: Sequence[int]) -> MlpBytes | None:
    """Return the MLP's part of a table's bytes.

    At a moment with tensors of the MLP's inner width, these and those of routed tokens exist for one tile only.
    """
    names = table["features"]
    wide = [index for index, name in enumerate(names) if "intermediate_size" in name]
    inside = [index for index, name in enumerate(names) if index in wide or name.startswith("routed_token")]
    if not wide:
        return None
    (saved_row,) = table["saved_per_layer"]

    def parts(rows: Sequence[Sequence[float]], kept_row: Sequence[float]) -> Parts:
        # Rows are relative to what layers keep, which contains inner tensors unless they are recomputed or tiled.
        kept_outside = sum(
            c * x for index, (c, x) in enumerate(zip(kept_row, point, strict=True)) if index not in inside
        )
        split = []
        for row in rows:
            live = [c + kept for c, kept in zip(row, kept_row, strict=True)]
            total = sum(c * x for c, x in zip(live, point, strict=True))
            inner = sum(live[index] * point[index] for index in inside) if any(live[index] for index in wide) else 0
            split.append((ceil(total - inner - kept_outside), ceil(inner)))
        return tuple(split)

    nothing = [0.0] * len(names)
    element = max(row[names.index("token*hidden_size")] for row in table["checkpointed_per_layer"])
    return MlpBytes(
        saved_bytes_per_layer=ceil(sum(saved_row[index] * point[index] for index in inside)),
        input_gradient_bytes=ceil(element * point[names.index("token*hidden_size")]),
        backward_transient=parts(table["backward_transient"], saved_row),
        recompute_backward_transient=parts(table["recompute_backward_transient"], nothing),
        recompute_beside_attention=parts(
            [
                row
                for row in table["recompute_backward_transient"]
                if all(
                    c >= kept
                    for name, c, kept in zip(names, row, saved_row, strict=True)
                    if name in ("token*query_size", "token*key_value_size", "token*attention_heads")
                )
            ],
            nothing,
        ),
        forward_transient=parts(table["forward_transient"], nothing),
    )


def with_tiled_mlp(traced: ActivationEstimate, share: float) -> ActivationEstimate:
    """Return the bytes of layers whose MLP computes tiles of `share` of the tokens; unchanged if nothing separates it.

    The tile's inner tensors exist in the forward pass, and in the backward pass, which computes them again.
    """
    mlp = traced.mlp
    if mlp is None or share >= 1:
        return traced
    during_attention = traced.attention_backward_bytes
    if during_attention is not None:
        # Without recomputation it is relative to what the layer keeps.
        during_attention += mlp.saved_bytes_per_layer
    return replace(
        traced,
        saved_bytes_per_layer=traced.saved_bytes_per_layer - mlp.saved_bytes_per_layer,
        attention_backward_bytes=during_attention,
        backward_transient_bytes=mlp.tiled(mlp.backward_transient, share, backward=True),
        recompute_backward_transient_bytes=mlp.tiled(mlp.recompute_backward_transient, share, backward=True),
        recompute_beside_attention_bytes=mlp.tiled(mlp.recompute_beside_attention, share, backward=True),
        forward_transient_bytes=mlp.tiled(mlp.forward_transient, share, backward=False),
    )


def mlp_tiles(model: ModelSpec, tokens_per_sequence: int) -> int:
    """Return the number of tiles, of as many tokens as the hidden size (`tile_mlps`, plugins/deepspeed)."""
    return max(1, ceil(tokens_per_sequence / max(1, model.dimensions.hidden_size)))


def tiled_mlp_elements(layout: Layout, model: ModelSpec, job: TrainingJob) -> int:
    """Return the elements of a layer's MLP on a rank, of which a tiled MLP adds up gradients; 0 without tiles."""
    tokens = ceil(job.seq_len_tokens / (layout.sp * layout.cp))
    if not layout.tiled_mlp or mlp_tiles(model, tokens) < 2:
        return 0
    in_layers = sum(p.total for p in model.parameters if p.group == "mlp" and p.in_layer)
    return in_layers // (layout.ep * max(1, model.dimensions.num_layers))


def norm_backward_bytes(element: int) -> int:
    """Return the bytes per element of hidden states in the backward pass of the final RMSNorm (traced)."""
    return 16 if element == 2 else 12


LOGITS_BYTES_OF_A_TILE = 2**30
"""Largest fp32 logits of one tile of the tiled loss."""


def loss_tiles(model: ModelSpec, tokens: int) -> int:
    """Return the number of tiles of the tiled loss for the tokens of a micro-batch on a rank."""
    return max(1, ceil(4 * tokens * model.dimensions.vocab_size / LOGITS_BYTES_OF_A_TILE))


def _largest(rows: list[list[float]], point: Sequence[int]) -> int:
    # A frozen tower has no backward pass. Rows of the class that a table is based on end before features of its own.
    return max((ceil(sum(c * x for c, x in zip(row, point, strict=False))) for row in rows), default=0)


def attention_path(dimensions: Dimensions, mode: Mode, attention: Attention) -> str:
    """Return the SDPA kernel that a CUDA run uses for `auto`.

    torch 2.13 `sdp_utils.cpp`: flash and cuDNN attention support only half precision, and memory-efficient attention
    does not support grouped key/value heads, so float32 with grouped heads falls back to the math kernel.
    """
    if attention != "auto":
        return attention
    grouped = dimensions.num_key_value_heads < dimensions.num_attention_heads
    return "math" if mode == "fp32" and grouped else "fused"


# A search needs the same micro-batch for every layout.
@lru_cache(maxsize=4096)
def estimate_activations(
    *,
    family: str,
    release: str,
    dimensions: Dimensions,
    micro_batch_size: int,
    seq_len_tokens: int,
    mode: Mode,
    adapter: Adapter = "none",
    lora_rank: int = 0,
    chunked_loss: bool = False,
    attention: Attention = "auto",
    kernels: Kernels = "eager",
) -> ActivationEstimate | None:
    """Return the activation bytes of one micro-batch on one rank, from traced coefficients; `None` if none are stored.

    `bytes = sum(coefficient * feature)` with `size_factors`; `docs/explain/memory.md` describes the measurement.

    Mode "bf16" also means fp16. Attention is "fused" without a mask; "masked" with padding, packed sequences marked by
    position ids, or a sliding window shorter than a short sequence; "eager" if transformers writes every score. Layers
    with other kernels that are not stored have the bytes of eager ones, an upper bound.
    """
    path = attention_path(dimensions, mode, attention)
    table = load_coefficients(release)["tables"].get(family, {}).get(mode, {}).get(adapter, {}).get(path)
    if table is None:
        return None
    if kernels != "eager" and adapter == "none":
        of_kernels = stored_facts(KERNELS_FILE, release)["tables"].get(kernels, {})
        table = of_kernels.get(family, {}).get(mode, {}).get(path, table)
    factors = size_factors(
        dimensions, micro_batch_size=micro_batch_size, seq_len_tokens=seq_len_tokens, lora_rank=lora_rank
    )
    point = [feature(name, factors) for name in table["features"]]
    estimate = _with_parts(_evaluated(table, point, {"": 1}, layers=1), table, point)
    if not chunked_loss:
        return estimate
    peaks = _loss_peaks(table, factors | {"lora_rank": 0})
    return _with_chunked_loss(estimate, dimensions, micro_batch_size * seq_len_tokens, mode, peaks)


def _loss_peaks(table: Mapping[str, Any], factors: Mapping[str, int]) -> Callable[[int, int], tuple[int, int]]:
    def peaks(tokens: int, vocab_size: int) -> tuple[int, int]:
        sizes = {**factors, "sequence": 1, "position": tokens, "token": tokens, "vocab_size": vocab_size}
        point = [feature(name, sizes) for name in table["features"]]
        return _largest(table["loss_forward_peak"], point), _largest(table["loss_backward_peak"], point)

    return peaks


def _with_chunked_loss(
    estimate: ActivationEstimate,
    dimensions: Dimensions,
    tokens: int,
    mode: Mode,
    loss_peaks: Callable[[int, int], tuple[int, int]],
) -> ActivationEstimate:
    """Return the bytes with Liger's loss; `loss_peaks` are those of forward and backward pass by tokens and vocabulary.

    The gradient of each chunk is computed immediately, so only the gradient of the hidden states is kept.
    """
    chunk_tokens = chunked_loss_tokens(tokens, dimensions.vocab_size, dimensions.hidden_size)
    if tokens <= chunk_tokens:
        return estimate
    peak = max(loss_peaks(chunk_tokens, dimensions.vocab_size))
    _, norm_backward = loss_peaks(tokens, 0)
    hidden_gradient = tokens * dimensions.hidden_size * (2 if mode == "bf16" else 4)
    return replace(
        estimate,
        loss_forward_peak_bytes=peak + hidden_gradient,
        loss_backward_peak_bytes=hidden_gradient + norm_backward,
    )


def has_fused_loss(model: ModelSpec, layout: Layout, job: TrainingJob, *, gpu: bool) -> bool:
    """Return whether Liger's kernel computes a chunked loss; tiles compute all others."""
    is_supported = model.task == "causal_lm" and has_liger_loss(model.model_type, alone=not job.use_liger_kernel)
    return job.loss == "chunked" and gpu and layout.sp == 1 and is_supported


def chunked_loss_tokens(tokens: int, vocab_size: int, hidden_size: int) -> int:
    """Return the tokens of one chunk, whose logits are about as large as all hidden states.

    `next power of two of ceil(tokens / ceil(vocab_size / hidden_size))`, as Liger's fused linear cross entropy does
    (liger_kernel/ops/fused_linear_cross_entropy.py).
    """
    chunks = -(-vocab_size // hidden_size)
    return 1 << (-(-tokens // chunks) - 1).bit_length()


KINDS_FILE = "kind_activations.json"
"""Traced `versions` and `families` by model class of a release of Transformers, followed by a word for other settings.

A family has the traced `settings`; `kinds` of layers in execution order, each with a parameter that such a layer has
once; and `tables` by mode, adapter and attention. A table is complete or, with `based_on`, a merge patch (see `merged`)
of the table of another adapter; tables of a class that is `based_on` another one, with the same layers, are merge
patches of that one's. `without_images` is the merge patch for a micro-batch of text.
"""


def kind_table(
    families: Mapping[str, Any], name: str, mode: str, adapter: str, attention: str
) -> dict[str, Any] | None:
    """Return the complete table of a family; `None` if none is stored."""
    family = families.get(name, {"tables": {}})
    table: dict[str, Any] | None = family["tables"].get(mode, {}).get(adapter, {}).get(attention)
    if table is not None and "based_on" in family:
        table = merged(kind_table(families, family["based_on"], mode, adapter, attention), table)
    if table is not None and "based_on" in table:
        table = merged(family["tables"][mode][table["based_on"]][attention], table)
    return table


def image_factors(*, images: int, patches: int, tokens: int) -> dict[str, int]:
    """Return the sizes of all images of a micro-batch.

    `patch` counts rows of the tower, and `image_token` tokens of the text. `tower` is 1 if there are images, for what
    does not depend on their number.
    """
    return {"image": images, "patch": patches, "image_token": tokens, "tower": min(1, images)}


_DELTA_RULE_CHUNK = 64
"""Tokens whose state the kernels of linear attention keep."""


def feature_factors(
    model: ModelSpec,
    *,
    micro_batch_size: int,
    seq_len_tokens: int,
    lora_rank: int = 0,
    images: ImageSizes | None = None,
) -> dict[str, int]:
    """Return the sizes of a model of several kinds of layers whose products are features, by name.

    These are `size_factors`, `image_factors`, the integers of its configuration, chunks of linear attention, and
    `patches` of an image, with the prefix of a nested vision configuration.
    """
    integers = {name: value for name, value in model.settings if isinstance(value, int) and not isinstance(value, bool)}
    patches = {
        name.removesuffix("image_size") + "patches": (value // integers[patch]) ** 2
        for name, value in integers.items()
        if name.endswith("image_size") and integers.get(patch := name.replace("image_size", "patch_size"))
    }
    sizes = size_factors(
        model.dimensions, micro_batch_size=micro_batch_size, seq_len_tokens=seq_len_tokens, lora_rank=lora_rank
    )
    width = integers.get("vision_config.embed_dim") or integers.get("vision_config.hidden_size", 0)
    heads = integers.get("vision_config.num_heads") or integers.get("vision_config.num_attention_heads", 0)
    tower = {"vision_config.head_dim": width // heads} if heads else {}
    embeds = (p for p in model.parameters if not p.in_layer and len(p.shape) > 1 and EMBEDS_PATCHES.search(p.name))
    chunk = integers.get("mamba_chunk_size") or integers.get("chunk_size") or _DELTA_RULE_CHUNK
    tower["chunk"] = micro_batch_size * -(-seq_len_tokens // chunk)
    tower["patch_pixels"] = max((p.numel // p.shape[0] for p in embeds), default=0)
    each = images or ImageSizes(images=0, patches=0, tokens=0)
    of_images = image_factors(
        images=micro_batch_size * each.images,
        patches=micro_batch_size * each.patches,
        tokens=micro_batch_size * each.tokens,
    )
    # Nemotron-H has dense layers whose parameters do not have the names of an MLP's.
    sizes = {name: size for name, size in sizes.items() if size or name not in integers}
    return tower | integers | patches | sizes | of_images


def layer_counts(model: ModelSpec, kinds: Mapping[str, str]) -> dict[str, int]:
    """Return the number of layers of each kind, from a parameter that each has once or from `layer_types=NAME`.

    A mark `A - B` counts layers with A and without B.
    """
    held: dict[str, Any] = {parameter.name: parameter.count for parameter in model.parameters if parameter.in_layer}
    held |= {name: count for name, count in model.settings if "=" in name}

    def counted(mark: str) -> int:
        first, *others = (int(held.get(name, 0)) for name in mark.split(" - "))
        return max(0, first - sum(others))

    return {kind: counted(mark) for kind, mark in kinds.items()}


@lru_cache(maxsize=4096)
def estimate_kinds(
    model: ModelSpec,
    *,
    micro_batch_size: int,
    seq_len_tokens: int,
    mode: Mode,
    adapter: Adapter,
    lora_rank: int,
    attention: str,
    chunked_loss: bool = False,
    images: ImageSizes | None = None,
) -> ActivationEstimate | None:
    """Return the activation bytes of one micro-batch, layers of all kinds summed and spread evenly.

    Without images, a vision tower does not run. `None` if nothing is stored for the class, mode, adapter or attention,
    or if it was traced with other settings.
    """
    families, settings = stored_facts(KINDS_FILE, model.release)["families"], dict(model.settings)
    names = (name for name in families if name.partition(" ")[0] == model.architecture)
    name = next((name for name in names if families[name]["settings"].items() <= settings.items()), None)
    if name is None:
        return None
    family = families[name]
    stored = family["tables"].get(mode, {}).get(adapter, {})
    if attention != "eager" and "fused" not in stored and "masked" in stored:
        # With images in the text, every batch has a mask.
        attention = "masked"
    table = kind_table(families, name, mode, adapter, attention)
    if table is None:
        return None
    counts = layer_counts(model, family["kinds"])
    if "without_images" in table and not (images and images.images):
        of_tower = {kind: 0 for kind in counts if image_part(family["kinds"][kind])}
        table, counts = merged(table, table["without_images"]), counts | of_tower
    if adapter in ("none", "none_liger", "lora_full_tower"):
        # Of a frozen tower before a trained projector.
        frozen = {parameter.name for parameter in model.parameters if parameter.frozen}
        counts = {kind: 0 if family["kinds"][kind] in frozen else count for kind, count in counts.items()}
    factors = feature_factors(
        model,
        micro_batch_size=micro_batch_size,
        seq_len_tokens=seq_len_tokens,
        lora_rank=lora_rank,
        images=images,
    )
    point = [feature(name, factors) for name in table["features"]]
    layers = max(1, model.dimensions.num_layers)
    tower = {kind for kind, mark in family["kinds"].items() if model.reads_images and image_part(mark)}
    estimate = _evaluated(table, point, counts, layers=layers, interleaved=family["interleaved"], tower=tower)
    if not chunked_loss:
        return estimate
    peaks = _loss_peaks(table, factors)
    return _with_chunked_loss(estimate, model.dimensions, micro_batch_size * seq_len_tokens, mode, peaks)


_ELEMENT_BYTES: dict[Mode, int] = {"bf16": 2, "bf16_autocast": 4, "fp32": 4}
_AROUND_ATTENTION = 1.5
"""Copies of each side of a projection in attention: queries before and after head norms and rotation."""
_INSIDE_MLP = 2.5
"""Copies of the inner side of each MLP matrix: GPT-2's GELU in single operators keeps six of its inner width."""
_INSIDE_TOWER_MLP = 1.5
"""The same in vision towers, whose activations are one operator, or CLIP's, which keeps three of its inner width."""
_NORM_ELEMENT_BYTES = 16
"""Bytes that a norm keeps for each element: input, normalised and scaled copies in fp32, and the output."""
_SCORE_BYTES = 10
"""Bytes of a score in eager attention: fp32 softmax 4, its copy in the compute type 2 or 4, a dropout mask 1."""
_SCORE_TRANSIENT_BYTES = 14
_LOGIT_BYTES = {"forward": 12, "backward": 16}
"""Bytes of a logit in the loss, capped ones (Gemma-2) included: an fp32 copy, log-probabilities, gradients."""
_EVERY_EXPERT = frozenset({"llama4", "llama4_text"})
"""Mixtures that run every token through all experts (transformers 5.17, `Llama4TextMoe`)."""
_MERGED_PATCHES = 4
"""Patches per text token of a vision tower without a position table (Qwen2-VL merges 2 x 2)."""
_HEAD_WIDTH = 64
"""Narrowest common head of a vision or audio tower, whose heads `ModelSpec` does not contain."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stack:
    """Layers with one name pattern."""

    name: str
    layers: int
    tokens: int
    """Tokens or patches of one sequence."""
    parameters: tuple[ParameterShape, ...]
    is_frozen: bool = False
    """Whether nothing before or in it is trained, so that it keeps nothing for a backward pass."""
    parts: int = 1
    """Images among the tokens, each with scores of its own."""


def bounded_activations(model: ModelSpec, job: TrainingJob, *, micro_batch_size: int, mode: Mode) -> ActivationEstimate:
    """Return an upper bound of the activation bytes of one micro-batch, from the model's structure.

    `saved = sum over layers of tokens * (copies * matrix sides + norms + routed experts) + scores`. Eager attention has
    `heads * tokens^2` scores per sequence. Raises `UsageError` for convolutions, or an unknown number of patches.
    """
    stacks = _stacks(model, job)
    element = _ELEMENT_BYTES[mode]
    layers = model.dimensions.num_layers
    covered = sum(stack.layers for stack in stacks)
    # Layers that share their parameters (ALBERT) run several times per tensor.
    repeats = max(1, ceil(layers / covered)) if covered else 1
    # SDPA converts a boolean mask to numbers in every layer.
    mask = element * job.seq_len_tokens if _has_mask(model, job) else 0
    sizes = [
        micro_batch_size * (_stack_bytes(stack, model, element) + stack.layers * stack.tokens * mask)
        for stack in stacks
    ]
    relative = any("rel_embeddings" in parameter.name for parameter in model.parameters)
    scores = [0] * len(stacks)
    if model.attention == "eager" and model.dimensions.num_attention_heads >= 1:
        for index, stack in enumerate(stacks):
            heads = max(model.dimensions.num_attention_heads, _width(stack, model) // _HEAD_WIDTH)
            # Disentangled attention (DeBERTa) and cross attention have more scores.
            attentions = 3 if relative else 2 if model.task == "seq2seq" and "decoder" in stack.name else 1
            scores[index] = micro_batch_size * stack.layers * heads * stack.tokens**2 // stack.parts * attentions
    inputs = [micro_batch_size * stack.tokens * _width(stack, model) * element * stack.layers for stack in stacks]
    saved = checkpointed = tower_saved = tower_checkpointed = 0
    for stack, size, count, checkpoint in zip(stacks, sizes, scores, inputs, strict=True):
        if not (model.reads_images and image_part(stack.name)):
            saved += repeats * (size + _SCORE_BYTES * count)
            checkpointed += repeats * checkpoint
        elif not stack.is_frozen:
            tower_saved += size + _SCORE_BYTES * count
            tower_checkpointed += checkpoint
    largest = max((size // stack.layers for size, stack in zip(sizes, stacks, strict=True)), default=0)
    largest_scores = max((count // stack.layers for count, stack in zip(scores, stacks, strict=True)), default=0)
    tokens = micro_batch_size * max([job.seq_len_tokens, *(stack.tokens for stack in stacks)])
    # Embeddings, final norm, rotation, and projections between towers.
    dimensions = model.dimensions
    per_token = 4 * (element + 4) * dimensions.hidden_size + 8 * dimensions.head_dim + 16
    per_token += sum(
        2 * element * (parameter.shape[0] + parameter.shape[-1])
        for parameter in model.parameters
        if not parameter.in_layer and parameter.group not in ("embedding", "head", "norm") and len(parameter.shape) > 1
    )
    outside = tokens * per_token
    if _has_mask(model, job):
        # Eager attention has a numeric mask per kind of layer (Gemma-2: two, in fp32).
        outside += (8 if model.attention == "eager" else 6) * tokens * job.seq_len_tokens
    if not layers:
        outside, saved, checkpointed = outside + saved, 0, 0
    # The loss of a model without a vocabulary is on the mean of its last hidden states.
    logits = micro_batch_size * job.seq_len_tokens * dimensions.vocab_size or tokens * dimensions.hidden_size
    # With a small vocabulary, the fp32 backward pass of the last norm is the largest.
    norm_bytes = 64 + max(4 * element, _NORM_ELEMENT_BYTES) * dimensions.hidden_size
    beside_logits = tokens * norm_bytes
    estimate = ActivationEstimate(
        saved_bytes_per_layer=-(-saved // max(1, layers)),
        checkpointed_bytes_per_layer=-(-checkpointed // max(1, layers)),
        tower_saved_bytes=tower_saved,
        tower_checkpointed_bytes=tower_checkpointed,
        outside_layer_bytes=outside,
        backward_transient_bytes=largest // 2 + _SCORE_TRANSIENT_BYTES * largest_scores,
        recompute_backward_transient_bytes=largest
        + largest // 2
        + (_SCORE_BYTES + _SCORE_TRANSIENT_BYTES) * largest_scores,
        forward_transient_bytes=largest + _SCORE_TRANSIENT_BYTES * largest_scores,
        loss_forward_peak_bytes=_LOGIT_BYTES["forward"] * logits + beside_logits,
        loss_backward_peak_bytes=_LOGIT_BYTES["backward"] * logits + beside_logits,
        autocast_weight_copy_bytes_per_parameter=2 if mode == "bf16_autocast" else 0,
        is_bound=True,
    )
    if job.loss != "chunked":
        return estimate

    def loss_peaks(tokens: int, vocab_size: int) -> tuple[int, int]:
        forward, backward = (
            tokens * (norm_bytes + _LOGIT_BYTES[name] * vocab_size) for name in ("forward", "backward")
        )
        return forward, backward

    return _with_chunked_loss(estimate, dimensions, micro_batch_size * job.seq_len_tokens, mode, loss_peaks)


def _stacks(model: ModelSpec, job: TrainingJob) -> list[_Stack]:
    grouped: dict[str, list[ParameterShape]] = defaultdict(list)
    for parameter in model.parameters:
        if parameter.in_layer:
            grouped[parameter.name.split(".*.")[0]].append(parameter)
    stacks, images = [], image_sizes(model, job)
    for name, parameters in grouped.items():
        if model.reads_images and image_part(name) and not job.images_per_sample:
            continue
        # A depthwise convolution over tokens (Mamba) keeps no more than its output; others have unknown feature maps.
        if any(
            parameter.kind != "experts"
            and (len(parameter.shape) >= 4 or (len(parameter.shape) == 3 and parameter.name.endswith("conv.weight")))
            and parameter.shape[1] > 1
            for parameter in parameters
        ):
            raise UsageError(_unbounded(model, f"{name} has convolutions, whose output sizes are unknown"))
        layers = max(parameter.count for parameter in parameters)
        tokens = _tokens(name, model, job)
        stack = _Stack(name=name, layers=layers, tokens=tokens, parameters=tuple(parameters))
        if images is not None and image_part(name):
            stack = replace(
                stack, tokens=images.patches, parts=images.images, is_frozen=all(p.frozen for p in parameters)
            )
        stacks.append(stack)
    if not stacks:
        raise UsageError(_unbounded(model, "it has no repeated layers"))
    if model.task != "seq2seq":
        return stacks
    # Cross attention of the decoder reads all tokens of the encoder.
    most = max(stack.tokens for stack in stacks)
    return [replace(stack, tokens=most) for stack in stacks]


def _unbounded(model: ModelSpec, why: str) -> ConfigError:
    return ConfigError(
        where="model",
        value=model.architecture,
        rule=f"has no stored activation coefficients, and no upper bound can be computed: {why}",
        fix="plan another model, or add its family with tools/add_family.py of the repository",
    )


def _tokens(stack: str, model: ModelSpec, job: TrainingJob) -> int:
    """Return the tokens, patches or frames of one sequence that pass through a stack.

    A stack with a vocabulary reads text. Otherwise the position table with the most similar name has a row per patch.
    """
    text, table, common = 0, 0, 0
    for parameter in model.parameters:
        if parameter.in_layer or len(parameter.shape) < 2:
            continue
        shared = 0
        for left, right in zip(stack.split("."), parameter.name.split("."), strict=False):
            if left != right:
                break
            shared += 1
        if parameter.shape[0] == model.dimensions.vocab_size:
            text = max(text, shared)
        elif "position" in parameter.name and shared >= common:
            table, common = max(parameter.shape[:-1]), shared
    is_text = text > common or (text == common and text > 0) or not table
    modality = any(word in stack for word in ("vision", "visual", "image", "audio", "speech"))
    if modality or not model.dimensions.vocab_size:
        if table and (not model.dimensions.vocab_size or common >= text):
            return table
        if not model.dimensions.vocab_size:
            raise UsageError(_unbounded(model, "it has no position table that gives its number of patches or frames"))
        return _MERGED_PATCHES * job.seq_len_tokens
    return job.seq_len_tokens if is_text else max(job.seq_len_tokens, table)


def _stack_bytes(stack: _Stack, model: ModelSpec, element: int) -> int:
    size = model.dimensions
    width = _width(stack, model)
    is_tower = model.reads_images and image_part(stack.name)
    inside_mlp = _INSIDE_TOWER_MLP if is_tower else _INSIDE_MLP
    total: float = stack.layers * (4 * size.num_attention_heads + 16)
    for parameter in stack.parameters:
        shape = parameter.shape
        if parameter.kind == "norm" and parameter.name.endswith(".bias"):
            continue
        if parameter.kind == "norm":
            # The weight of a head norm has the width of one head, but is applied to all heads.
            elements = size.query_size if shape[-1] == size.head_dim and shape[-1] < width else shape[-1]
            total += parameter.count * _NORM_ELEMENT_BYTES * elements
        elif parameter.kind == "experts" and len(shape) == 3:
            routed = size.num_experts if model.model_type in _EVERY_EXPERT else max(1, size.experts_per_token)
            inner = shape[1] if shape[2] == width else shape[2]
            total += parameter.count * routed * (element * (_INSIDE_MLP * inner + 2 * width) + 8)
        elif len(shape) == 2 and parameter.kind in ("linear", "router", "other"):
            rows, columns = shape
            copies = _AROUND_ATTENTION * (rows + columns)
            if parameter.group == "mlp":
                inner = rows if columns == width else columns if rows == width else max(rows, columns)
                copies = inside_mlp * inner + width
                if ".experts." in parameter.name and size.num_experts:
                    # Each expert is a separate module, and a token passes through few of them.
                    copies = copies * max(1, size.experts_per_token) / size.num_experts
            total += parameter.count * element * copies
    return ceil(stack.tokens * total)


def _width(stack: _Stack, model: ModelSpec) -> int:
    """Width of the residual stream, which is that of the norms in a tower with another width."""
    widths = [parameter.shape[-1] for parameter in stack.parameters if parameter.kind == "norm"]
    hidden = model.dimensions.hidden_size
    return hidden if not widths or hidden in widths else max(widths)


def _has_mask(model: ModelSpec, job: TrainingJob) -> bool:
    window = model.sliding_window
    return model.attention == "eager" or bool(window and job.seq_len_tokens > window)


def activations_of(
    model: ModelSpec, job: TrainingJob, micro_batch_size: int, mode: Mode, *, unmasked: Attention = "auto"
) -> ActivationEstimate:
    """Return the activation bytes of a micro-batch from stored coefficients, or an upper bound if none are stored.

    `unmasked` is the attention kernel without a mask.
    """
    traced = _of_profile(model, job, micro_batch_size, mode, unmasked)
    if job.method == "full" or job.lora_variant != "dora":
        return traced
    # The gradients of DoRA's norms need the outputs of the weight and of its adapters.
    axis = -1 if model.model_type in CONV1D_FAMILIES else 0
    widths = sum(p.count * p.shape[axis] for p in targeted_linears(model, job.lora_targets))
    element, tokens = 4 if mode == "fp32" else 2, micro_batch_size * job.seq_len_tokens
    return _keeping(traced, 2 * element * tokens * widths // max(1, model.dimensions.num_layers))


def _of_profile(
    model: ModelSpec, job: TrainingJob, micro_batch_size: int, mode: Mode, unmasked: Attention
) -> ActivationEstimate:
    attention = attention_of(model, job.seq_len_tokens, unmasked=unmasked)

    def stored(mode: Mode, adapter: Adapter) -> ActivationEstimate | None:
        rank = 0 if adapter in _FULL else job.lora_rank
        # Tables by dimensions are stored for text families, tables by kind of layer for all others.
        has_family = model.task == "causal_lm" and model.model_type in load_coefficients(model.release)["tables"]
        if not has_family:
            return estimate_kinds(
                model,
                micro_batch_size=micro_batch_size,
                seq_len_tokens=job.seq_len_tokens,
                mode=mode,
                adapter=adapter,
                lora_rank=rank,
                attention=attention_path(model.dimensions, mode, attention),
                chunked_loss=job.loss == "chunked",
                images=image_sizes(model, job),
            )
        traced = estimate_activations(
            family=model.model_type,
            release=model.release,
            dimensions=model.dimensions,
            micro_batch_size=micro_batch_size,
            seq_len_tokens=job.seq_len_tokens,
            mode=mode,
            adapter=adapter,
            lora_rank=rank,
            chunked_loss=job.loss == "chunked",
            attention=attention,
            # A compiler keeps the calls of Liger's kernels.
            kernels="liger" if job.use_liger_kernel else "compiled" if job.torch_compile else "eager",
        )
        if traced is None or unmasked == "masked" or not has_window_blocks(model, job.seq_len_tokens):
            return traced
        return _with_window_blocks(traced, model, job, micro_batch_size, mode)

    # Profiles that bound the job's activations, closest first; each keeps at least what the previous one keeps. Other
    # targets than those of attention count as all Linear modules.
    reads_frozen = model.reads_images and job.vision_tower == job.projector == "frozen"
    profiles: tuple[Adapter, ...] = ("frozen_tower", "none") if reads_frozen else ("none",)
    if model.reads_images and job.use_liger_kernel:
        profiles = ("none_liger", *profiles)
    adapted = [] if job.method == "full" else adapted_experts(model, job.lora_targets)
    if job.method != "full":
        whole = model.reads_images and {job.vision_tower, job.projector} <= {"frozen", "full"}
        of_text: Adapter = "lora_language" if reads_frozen else "lora_full_tower"
        profiles = (of_text, *profiles) if whole else ("lora_all_linear", "none")
        if set(job.lora_targets) <= {"q_proj", "v_proj"}:
            profiles = ("lora_attention", *profiles)
        elif adapted and not targeted_linears(model, job.lora_targets):
            profiles = ("lora_experts", *profiles)
    for adapter in profiles:
        traced = stored(mode, adapter)
        if traced is None:
            continue
        if adapter == "lora_experts":
            # PEFT casts fp32 adapters itself; the table counts that.
            return replace(traced, autocast_weight_copy_bytes_per_parameter=0)
        if adapter not in _FULL and adapted and not adapted_experts(model, (ALL_LINEAR,)):
            # Their layers keep the inputs of experts too.
            sizes, element = model.dimensions, 4 if mode == "fp32" else 2
            widths = sum(sizes.expert_intermediate_size if "down" in p.name else sizes.hidden_size for p in adapted)
            routed = micro_batch_size * job.seq_len_tokens * sizes.experts_per_token
            traced = _keeping(traced, element * routed * widths)
        if mode != "bf16_autocast" or (adapter in _FULL) == (job.method == "full"):
            return traced
        # Under autocast the frozen weights are 16-bit and only the adapters are copied.
        copies, frozen = traced.autocast_weight_copy_bytes_per_parameter, stored("bf16", adapter)
        assert frozen is not None, "every stored family has the tables of 16-bit layers"
        return replace(frozen, autocast_weight_copy_bytes_per_parameter=copies)
    return bounded_activations(model, job, micro_batch_size=micro_batch_size, mode=mode)


def _keeping(traced: ActivationEstimate, more: int) -> ActivationEstimate:
    """Return the bytes if each layer keeps `more` until its backward pass."""
    return replace(
        traced,
        saved_bytes_per_layer=traced.saved_bytes_per_layer + more,
        recompute_backward_transient_bytes=traced.recompute_backward_transient_bytes + more,
    )


SMALLEST_MASK_TOKENS = 2**13
"""Tokens from which sliding windows run in blocks, without a mask (plugins/transformers/attention.py)."""


def attention_of(model: ModelSpec, seq_len_tokens: int, *, unmasked: Attention = "auto") -> Attention:
    if model.attention == "eager" or unmasked == "masked":
        return "eager" if model.attention == "eager" else "masked"
    has_window = 0 < (model.sliding_window or 0) < seq_len_tokens
    return "masked" if has_window and not has_window_blocks(model, seq_len_tokens) else unmasked


def has_window_blocks(model: ModelSpec, seq_len_tokens: int) -> bool:
    """Return whether SDPA computes a causal sliding window in blocks; unknown families may make a mask."""
    has_window = 0 < (model.sliding_window or 0) < seq_len_tokens
    is_long = has_window and model.attention != "eager" and seq_len_tokens >= SMALLEST_MASK_TOKENS
    return is_long and model.task == "causal_lm" and model.model_type in load_coefficients(model.release)["tables"]


def _with_window_blocks(
    traced: ActivationEstimate, model: ModelSpec, job: TrainingJob, micro_batch_size: int, mode: Mode
) -> ActivationEstimate:
    """Return the bytes of attention in blocks of W tokens, which also read the W tokens before them.

    A block after the first has a mask, with which SDPA repeats keys and values for all query heads. Outputs of blocks
    are joined in a copy. The mask of W x 2 W is shared by layers and blocks, and the last block may be shorter.
    """
    element, window, tokens = 4 if mode == "fp32" else 2, model.sliding_window or 0, job.seq_len_tokens
    keys = tokens - window + window * (ceil(tokens / window) - 1)
    copies = 2 * keys + tokens
    in_layer = element * micro_batch_size * copies * model.dimensions.query_size
    shorter = tokens % window
    masks = element * (2 * window**2 + shorter * (window + shorter))
    mlp = traced.mlp
    if mlp is not None:
        parts = tuple((outside + in_layer, inner) for outside, inner in mlp.recompute_backward_transient)
        mlp = replace(mlp, recompute_backward_transient=parts)
    return replace(
        traced,
        saved_bytes_per_layer=traced.saved_bytes_per_layer + in_layer,
        outside_layer_bytes=traced.outside_layer_bytes + masks,
        recompute_backward_transient_bytes=traced.recompute_backward_transient_bytes + in_layer,
        mlp=mlp,
    )


def activation_mode(layout: Layout, job: TrainingJob) -> Mode:
    """Return the precision mode of an engine: 16-bit weights (DeepSpeed, FSDP2) or autocast (one process, DDP)."""
    if job.precision == "fp32":
        return "fp32"
    autocasts = layout.engine in ("single", "ddp") and job.weights_dtype != "bf16"
    return "bf16_autocast" if autocasts else "bf16"


def activations_are_stored(model: ModelSpec, job: TrainingJob, layout: Layout) -> bool:
    """Return whether coefficients are stored for the precision mode of a layout."""
    try:
        return not activations_of(model, job, 1, activation_mode(layout, job)).is_bound
    except UsageError:
        return False
