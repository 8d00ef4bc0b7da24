"""Costs of training software beside the arithmetic: kernels, memory traffic, overlap. Facts of code alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Software:
    """Way in which a stack computes a decoder layer and a step; bytes are per element of a 16-bit activation."""

    attention: Literal["fused", "eager"] = "fused"
    """Fused kernels (FlashAttention, sdpa) keep scores on chip and skip the masked half; eager ones write scores."""
    hidden_bytes_forward: float
    """Memory traffic of norms, residuals and dropout in a layer's forward pass, for each element of hidden size."""
    hidden_bytes_backward: float
    """The same in the backward pass."""
    inner_bytes_forward: float
    """Memory traffic of the activation function, for each element of the MLP's inner width."""
    inner_bytes_backward: float
    """The same in the backward pass."""
    projected_bytes: float = 0.0
    """Memory traffic of rotary embeddings and transposes, for each element of queries and keys, both passes."""
    score_bytes_forward: float = 0.0
    """Memory traffic of eager attention for each score between its products: mask, softmax, dropout."""
    score_bytes_backward: float = 0.0
    """The same in the backward pass."""
    loss_bytes: float
    """Memory traffic of the loss for each logit, both passes: casts, softmax, its gradient."""
    kernels_forward: float
    """Kernels that a layer's forward pass launches."""
    kernels_backward: float
    """Kernels that a layer's backward pass launches."""
    kernels_outside: float = 60.0
    """Kernels of embedding, final norm, head and loss, both passes."""
    optimizer_bytes: float
    """Memory traffic of the optimizer step for each parameter that a rank steps: gradients, norm, states, weights."""
    gradient_bytes: float | None = None
    """Memory traffic of adding a micro-batch's gradient, for each parameter; `None`: two reads and a write."""
    step_seconds: float = 0.0
    """Host time once in a step: data loader, scheduler, logging."""
    micro_batch_seconds: float = 0.0
    """Host time of each micro-batch beyond its kernels: hooks of the engine, collation, copies to the device."""
    overlaps_reduction: bool = True
    """Whether gradients are reduced beside the backward pass of the last micro-batch."""
    overlaps_updates: bool = False
    """Whether updated parameters are gathered beside the forward pass of the first micro-batch (Megatron-Core's
    `--overlap-param-gather`)."""
    overlaps_gathers: bool = True
    """Whether sharded parameters are gathered beside the computation of the layers before."""
    overlaps_tensor_parallel: bool = False
    """Whether the collectives of tensor parallelism run in pieces beside the products (Megatron-Core, async TP)."""
    scatters_transfers: bool = False
    """Whether ranks of tensor parallelism each pass on their part between stages (arXiv 2104.04473, section 4.1)."""
    overlaps_transfers: bool = False
    """Whether stages pass micro-batches on beside their computation (Megatron-Core)."""
    reduction_bytes: int | None = None
    """Bytes of an element on its way through a gradient reduction; `None`: what the engine does."""
    reduces_to_owners: bool = False
    """Whether ZeRO-1 and ZeRO-2 reduce each gradient to the rank that steps it, as in the paper; DeepSpeed all-reduces
    whole buckets and takes its part (`use_multi_rank_bucket_allreduce`, 0.19.8 stage_1_and_2.py:1695)."""
    sequence_parallel_norms: bool = False
    """Whether tensor parallelism also divides norms and residuals (Megatron's sequence parallelism)."""
    even_stages: bool = False
    """Whether pipeline stages hold equally many layers (Megatron), rather than the cut that is fastest."""
    update_bucket: int = 200_000_000
    """Elements of one all-gather of updated parameters (`allgather_bucket_size`, which the plan leaves at 2e8)."""
    virtual_stages: int = 1
    """Stages of an interleaved pipeline on each rank."""
    padded_vocabulary: int | None = None
    """Multiple to which the vocabulary is padded; `None`: not at all."""
    vocabulary_parallel: bool = False
    """Whether tensor parallelism divides embedding and head by the vocabulary (Megatron), tied ones too."""
    optimizer_ranks: int | None = None
    """Ranks that share the optimizer states, where that is not all of them (hierarchical ZeRO-1)."""
    selective_recomputation: bool = False
    """Whether attention alone is recomputed (arXiv 2205.05198)."""
    float8: bool = False
    """Whether the products of the layers run in fp8, at twice the FLOP/s."""


TRANSFORMERS = Software(
    hidden_bytes_forward=84.0,
    hidden_bytes_backward=130.0,
    inner_bytes_forward=10.0,
    inner_bytes_backward=18.0,
    projected_bytes=60.0,
    loss_bytes=32.0,
    kernels_forward=45.0,
    kernels_backward=85.0,
    optimizer_bytes=44.0,
    step_seconds=5e-3,
    micro_batch_seconds=2e-3,
)
"""Transformers 5 with eager RMSNorm in fp32 (36 bytes for each of two), rotary embeddings, sdpa and SwiGLU: counted in
`modeling_llama.py` operation by operation, reads and writes."""


EAGER_ATTENTION = replace(TRANSFORMERS, attention="eager", score_bytes_forward=20.0, score_bytes_backward=28.0)
"""The same with `eager_attention_forward`: scale, mask, softmax in fp32 and its cast back are kernels of their own."""
