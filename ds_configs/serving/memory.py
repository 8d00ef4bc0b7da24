"""Memory of one GPU that serves a model: stored weights, workspace of a step, and what is left for the cache.

    cache = memory of the GPU · share of the engine - weights - workspace - runtime

vLLM 0.32.0 measures workspace and runtime when it starts (`v1/worker/gpu_worker.py`); here they are an estimate that no
GPU has confirmed yet. The count of blocks from the cache's bytes is exact.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..specs.dimensions import Dimensions

RUNTIME_BYTES = 1_500_000_000
"""Context, libraries, communicators and captured graphs of one process on a GPU; an assumption."""
_EVERYWHERE = re.compile(r"(kv_a_proj\w*|q_a_proj|kv_a_layernorm|mlp\.gate|router|block_sparse_moe\.gate)(\.|$)")
"""Matrices that vLLM 0.32.0 keeps whole on every GPU (`ReplicatedLinear`)."""
_KEYS_AND_VALUES = re.compile(r"\.(k_proj|v_proj)\.")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredWeight:
    """One tensor of a checkpoint."""

    stored_bytes: int
    """Its bytes in the file."""
    is_matrix: bool
    """Whether it has two dimensions or more."""
    is_fp32: bool
    """Whether its numbers are fp32; the engine keeps matrices and norms of a dense checkpoint in 16 bits."""


def weight_bytes(
    tensors: Mapping[str, StoredWeight], *, tensor_parallel_size: int, num_key_value_heads: int, halve_fp32: bool
) -> int:
    """Return the bytes of a checkpoint's weights on one of the GPUs that share it.

    Args:
        tensors: Every tensor by its name.
        tensor_parallel_size: GPUs that divide matrices between them.
        num_key_value_heads: Key-value heads; fewer than GPUs are kept by several.
        halve_fp32: Whether fp32 weights are served in 16 bits, as vLLM does with `dtype` auto.
    """
    total = 0
    for name, tensor in tensors.items():
        size = tensor.stored_bytes // 2 if halve_fp32 and tensor.is_fp32 else tensor.stored_bytes
        shares = 1
        if tensor.is_matrix and not _EVERYWHERE.search(name):
            shares = tensor_parallel_size
            if _KEYS_AND_VALUES.search(name):
                shares = min(shares, num_key_value_heads)
        total += -(-size // shares)
    return total


def workspace_bytes(
    dimensions: Dimensions, *, tensor_parallel_size: int, batched_tokens: int, sequences: int
) -> dict[str, int]:
    """Return the largest tensors of a step in 16 bits, and of sampling in fp32; only one of them lives at a time.

    A step holds the residual stream three times (itself, the norm of it, the layer's output), beside the widest of a
    layer's products; sampling holds logits in 16 bits and twice in fp32 (log-probabilities, and sorted).

    Args:
        dimensions: Sizes of the decoder.
        tensor_parallel_size: GPUs that divide heads and MLPs between them.
        batched_tokens: Most tokens of one step.
        sequences: Most sequences of one step.
    """
    streams = 3 * batched_tokens * dimensions.hidden_size
    attention = batched_tokens * (2 * dimensions.query_size + 2 * dimensions.key_value_size)
    dense = 3 * batched_tokens * dimensions.intermediate_size
    experts = 3 * batched_tokens * dimensions.experts_per_token * dimensions.expert_intermediate_size
    routed = batched_tokens * dimensions.experts_per_token * dimensions.hidden_size if experts else 0
    widest = max(attention, dense, experts) // tensor_parallel_size + routed
    return {"step": 2 * (streams + widest), "sampling": sequences * dimensions.vocab_size * (2 + 4 + 4)}


def largest(parts: Iterable[Mapping[str, int]]) -> int:
    """Return the sum of each model's larger workspace: a draft keeps its own while the model runs."""
    return sum(max(part.values()) for part in parts)
