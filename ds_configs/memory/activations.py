"""Bytes of activations that one training step keeps and transiently needs, from traced integer coefficients."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from math import ceil
from typing import Any, Literal

from ..specs.dimensions import Dimensions
from ..specs.errors import ShardwrightError

Mode = Literal["bf16", "fp32", "bf16_autocast"]
Adapter = Literal["none", "lora_all_linear", "lora_attention"]
Attention = Literal["auto", "fused", "masked", "math", "eager"]

DATA_FILE = "activations.json"
ADDED_FILE = "added_activations.json"
"""Families that `tools/add_family.py` stored, with the same structure."""
SELECTIVE_FILE = "selective_activations.json"
"""Coefficients of `SelectiveBytes` in full training, by family, mode and attention."""


class UnknownFamilyError(ShardwrightError):
    """No coefficients are stored for a model family, or not for the asked mode or adapter."""

    exit_code = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectiveBytes:
    """Activation bytes of a layer whose checkpointing keeps the results of products and fused attention."""

    kept_bytes_per_layer: int
    """Kept from forward to backward: the layer's input, and those results."""
    forward_transient_bytes: int
    """Largest live bytes in the last layer's forward beyond what all layers keep."""
    backward_transient_bytes: int
    """Largest live bytes in the last layer's backward beyond that and `outside_layer_bytes`."""


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
    """Live around the layers when the output head starts: rotary tables, masks, embedding output, final norm."""
    backward_transient_bytes: int
    """Largest live bytes in the last layer's backward beyond all layers' saved bytes and `outside_layer_bytes`."""
    recompute_backward_transient_bytes: int
    """The same with checkpointing: holds the recomputed layer's saved tensors too."""
    forward_transient_bytes: int
    """Largest live bytes in one checkpointed layer's forward beyond those live when it starts."""
    selective: SelectiveBytes | None = None
    """What a layer keeps and needs that recomputes all but its products; `None` where nobody traced it."""
    loss_forward_peak_bytes: int
    """Largest live bytes from the output head to the end of the loss, beyond what the layers and `outside` keep."""
    loss_kept_bytes: int
    """What head and loss keep until the backward; at most slightly negative, when less lives than before."""
    loss_backward_peak_bytes: int
    """Largest live bytes in the backward of loss, head and final norm, counted like the forward peak."""
    autocast_weight_copy_bytes_per_parameter: int
    """Bytes of the cached half-precision copy of each float32 matrix that a linear layer uses; 0 without autocast."""
    source: str
    """Where the coefficients come from, with the versions traced."""


def feature_values(
    dimensions: Dimensions, *, micro_batch_size: int, seq_len_tokens: int, lora_rank: int = 0
) -> dict[str, int]:
    """Returns the features in which activation bytes are linear, by readable name.

    A feature `token*x` is `micro_batch_size * seq_len_tokens * x`; `position*x` counts every position once, whatever
    the batch; `attention_mask` is `micro_batch_size * seq_len_tokens**2` and `attention_scores` that times the heads.
    """
    tokens = micro_batch_size * seq_len_tokens
    routed = tokens * dimensions.experts_per_token
    return {
        "constant": 1,
        "sequence": micro_batch_size,
        "position": seq_len_tokens,
        "position*head_dim": seq_len_tokens * dimensions.head_dim,
        "token": tokens,
        "token*hidden_size": tokens * dimensions.hidden_size,
        "token*query_size": tokens * dimensions.query_size,
        "token*key_value_size": tokens * dimensions.key_value_size,
        "token*intermediate_size": tokens * dimensions.intermediate_size,
        "token*attention_heads": tokens * dimensions.num_attention_heads,
        "token*key_value_heads": tokens * dimensions.num_key_value_heads,
        "token*vocab_size": tokens * dimensions.vocab_size,
        "token*lora_rank": tokens * lora_rank,
        "expert": dimensions.num_experts,
        "token*expert": tokens * dimensions.num_experts,
        "routed_token": routed,
        "routed_token*hidden_size": routed * dimensions.hidden_size,
        "routed_token*expert_intermediate_size": routed * dimensions.expert_intermediate_size,
        "routed_token*expert": routed * dimensions.num_experts,
        "routed_token*lora_rank": routed * lora_rank,
        "expert*lora_rank*hidden_size": dimensions.num_experts * lora_rank * dimensions.hidden_size,
        "expert*lora_rank*expert_intermediate_size": dimensions.num_experts
        * lora_rank
        * dimensions.expert_intermediate_size,
        "attention_mask": tokens * seq_len_tokens,
        "attention_scores": tokens * seq_len_tokens * dimensions.num_attention_heads,
        "position*position": seq_len_tokens**2,
    }


@lru_cache(maxsize=1)
def load_coefficients() -> Mapping[str, Any]:
    """Reads the stored coefficient tables: `versions`, and `tables` by family, mode, adapter and attention."""
    data = resources.files(__package__.rpartition(".")[0]).joinpath("data")
    first, added = (json.loads(data.joinpath(name).read_text(encoding="utf-8")) for name in (DATA_FILE, ADDED_FILE))
    return {"versions": first["versions"], "tables": first["tables"] | added["tables"]}


@lru_cache(maxsize=1)
def load_selective() -> Mapping[str, Any]:
    """Reads the stored coefficients of `SelectiveBytes` by family, mode and attention."""
    data = resources.files(__package__.rpartition(".")[0]).joinpath("data", SELECTIVE_FILE)
    tables: Mapping[str, Any] = json.loads(data.read_text(encoding="utf-8"))["tables"]
    return tables


def evaluate_table(table: Mapping[str, Any], features: Mapping[str, int], source: str) -> ActivationEstimate:
    """Turns one coefficient table into bytes: the largest candidate of each quantity, `sum(coefficient * feature)`."""

    def largest(name: str) -> int:
        return _largest(table, name, features)

    return ActivationEstimate(
        saved_bytes_per_layer=largest("saved_per_layer"),
        checkpointed_bytes_per_layer=largest("checkpointed_per_layer"),
        outside_layer_bytes=largest("outside_layers"),
        backward_transient_bytes=max(0, largest("backward_transient")),
        recompute_backward_transient_bytes=max(0, largest("recompute_backward_transient")),
        forward_transient_bytes=largest("forward_transient"),
        loss_forward_peak_bytes=largest("loss_forward_peak"),
        loss_kept_bytes=largest("loss_kept"),
        loss_backward_peak_bytes=largest("loss_backward_peak"),
        autocast_weight_copy_bytes_per_parameter=int(table["weight_copy_bytes_per_parameter"]),
        source=source,
    )


def _largest(table: Mapping[str, Any], name: str, features: Mapping[str, int]) -> int:
    point = [features[feature] for feature in table["features"]]
    candidates: list[list[float]] = table[name]
    return max(ceil(sum(c * x for c, x in zip(candidate, point, strict=True))) for candidate in candidates)


def _selective(family: str, mode: Mode, adapter: Adapter, path: str, features: Mapping[str, int]) -> Any:
    table = load_selective().get(family, {}).get(mode, {}).get(path)
    if table is None or adapter != "none":
        return None
    return SelectiveBytes(
        kept_bytes_per_layer=_largest(table, "kept_per_layer", features),
        forward_transient_bytes=max(0, _largest(table, "forward_transient", features)),
        backward_transient_bytes=max(0, _largest(table, "backward_transient", features)),
    )


def attention_path(dimensions: Dimensions, mode: Mode, attention: Attention) -> str:
    """Says which SDPA kernel a CUDA run takes, when `auto` leaves the choice open.

    torch 2.13 `sdp_utils.cpp`: flash and cuDNN attention take half precision only, and memory-efficient attention
    refuses grouped key/value heads, so float32 with grouped heads falls back to the math kernel.
    """
    if attention != "auto":
        return attention
    grouped = dimensions.num_key_value_heads < dimensions.num_attention_heads
    return "math" if mode == "fp32" and grouped else "fused"


# A search asks for the same micro-batch under every strategy.
@lru_cache(maxsize=4096)
def estimate_activations(
    *,
    family: str,
    dimensions: Dimensions,
    micro_batch_size: int,
    seq_len_tokens: int,
    mode: Mode,
    adapter: Adapter = "none",
    lora_rank: int = 0,
    chunked_loss: bool = False,
    attention: Attention = "auto",
) -> ActivationEstimate:
    """Returns the activation bytes of one micro-batch on one rank, from traced coefficients.

    `bytes = sum(coefficient * feature)` with `feature_values`; `docs/explain/memory.md` says how the coefficients were
    measured. `family` is the `model_type` of `config.json`; `mode` "bf16" also stands for fp16. `attention` is "fused"
    when no mask reaches attention, "masked" with padding, with packed sequences told by position numbers, or with a
    sliding window shorter than the sequence, and "eager" where transformers writes every score. `chunked_loss`
    evaluates head and loss at `chunked_loss_tokens` tokens at a time.

    Raises:
        UnknownFamilyError: nothing is stored for this family, mode, adapter or attention; trace the model instead.
    """
    stored = load_coefficients()
    path = attention_path(dimensions, mode, attention)
    table = stored["tables"].get(family, {}).get(mode, {}).get(adapter, {}).get(path)
    if table is None:
        raise UnknownFamilyError(
            f"family = {family!r}: no activation coefficients for mode {mode!r}, adapter {adapter!r} and attention "
            f"{path!r}; stored families are {', '.join(sorted(stored['tables']))}; trace "
            "the model from its config instead"
        )
    source = f"traced coefficients, {family}, {mode}, {adapter}, {path} attention; " + ", ".join(
        f"{name} {version}" for name, version in stored["versions"].items()
    )
    whole = feature_values(
        dimensions, micro_batch_size=micro_batch_size, seq_len_tokens=seq_len_tokens, lora_rank=lora_rank
    )
    estimate = evaluate_table(table, whole, source)
    estimate = replace(estimate, selective=_selective(family, mode, adapter, path, whole))
    tokens = micro_batch_size * seq_len_tokens
    if not chunked_loss or tokens <= chunked_loss_tokens(tokens, dimensions):
        return estimate
    return _with_chunked_loss(estimate, table, dimensions, tokens, mode)


def chunked_loss_tokens(tokens: int, dimensions: Dimensions) -> int:
    """Returns the tokens of one chunk: logits of a chunk about as large as all hidden states.

    `next power of two of ceil(tokens / ceil(vocab_size / hidden_size))`, as Liger's fused linear cross entropy does
    (liger_kernel/ops/fused_linear_cross_entropy.py).
    """
    chunks = -(-dimensions.vocab_size // dimensions.hidden_size)
    return 1 << (-(-tokens // chunks) - 1).bit_length()


def _with_chunked_loss(
    estimate: ActivationEstimate, table: Mapping[str, Any], dimensions: Dimensions, tokens: int, mode: Mode
) -> ActivationEstimate:
    """Head and loss chunk by chunk, each chunk's gradient taken at once: only the hidden gradient is kept."""
    chunk_tokens = chunked_loss_tokens(tokens, dimensions)
    features = feature_values(dimensions, micro_batch_size=1, seq_len_tokens=chunk_tokens)
    chunk = evaluate_table(table, features, estimate.source)
    headless = feature_values(replace(dimensions, vocab_size=0), micro_batch_size=1, seq_len_tokens=tokens)
    norm_backward = evaluate_table(table, headless, estimate.source).loss_backward_peak_bytes
    hidden_gradient = tokens * dimensions.hidden_size * (2 if mode == "bf16" else 4)
    peak = max(chunk.loss_forward_peak_bytes, chunk.loss_backward_peak_bytes)
    return replace(
        estimate,
        loss_forward_peak_bytes=peak + hidden_gradient,
        loss_kept_bytes=hidden_gradient,
        loss_backward_peak_bytes=hidden_gradient + norm_backward,
        source=f"{estimate.source}; loss in chunks of {chunk_tokens} tokens",
    )
