"""Memory of head and loss: the eager loss, chunked and tiled ones, and the fused loss of distillation.

The fused loss computes the logits of a chunk of rows, so no [tokens × vocabulary] tensor of either model exists
(`trainers/losses/fused_loss.py`).
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from ..specs.job import TrainingJob
from ..specs.layout import Layout
from ..specs.model import ModelSpec
from ..specs.terms import Term
from .activations import ActivationEstimate, activation_mode, loss_tiles, norm_backward_bytes
from .moments import Moment, Terms, at_moments
from .rank_parameters import RankStep, engine_parameters

TERMS = (
    Term(
        "loss",
        "logits, their fp32 copy and the gradients of head and loss at their joint peak; with a teacher those "
        "of a chunk of rows, and with a chunked loss those of a chunk or tile",
        role="activations",
    ),
    Term(
        "head_gradient",
        "gradient of the output head, which a chunked loss computes early; in fp32 with a teacher",
        role="gradients",
    ),
)

CHUNK_BYTES = 320 * 2**20
"""Largest size of the logits of both heads that the fused loss computes at a time."""

BLOCK_BYTES = 32 * 2**20
"""Largest fp32 tensor of logits rows that it processes at a time on an accelerator, if kernels cannot be compiled."""

COMPILED_BYTES_OF_A_LOGIT = 12
"""Most that compiled kernels keep of a chunk: three fp32 temporaries (JSD; none to two for other divergences)."""

_BLOCK_BYTES_OF_A_LOGIT = 45 + 4
"""Eleven fp32 temporaries and a mask, measured, and one for a soft-cap or 16-bit products."""

_BYTES_OF_A_ROW = 32
"""A weight and seven values of each row, in fp32."""

HEAD_ROWS = 8192
"""Rows of the head per addition of its fp32 gradient on a CPU; GPUs add within the product."""


def with_tiled_loss(
    layout: Layout, model: ModelSpec, job: TrainingJob, traced: ActivationEstimate
) -> ActivationEstimate:
    """Return the bytes of a loss in tiles: those of one tile's eager loss, and the gradient of the hidden states.

    The forward pass keeps nothing; the backward pass computes each tile again and writes into the gradient
    (`SequenceTiledCompute` in deepspeed/runtime/sequence_parallel/ulysses_sp.py, 0.19.8).
    """
    ranks = layout.sp * layout.cp
    tokens = layout.micro_batch_size * job.seq_len_tokens // ranks
    tiles = loss_tiles(model, tokens)
    width = 4 if activation_mode(layout, job) != "bf16" else 2
    # `loss_terms` divides by the ranks that share a sequence.
    hidden_gradient = width * ranks * tokens * model.dimensions.hidden_size
    forward = ceil(traced.loss_forward_peak_bytes / tiles)
    backward = hidden_gradient + max(forward, ceil(traced.loss_backward_peak_bytes / tiles))
    norm = norm_backward_bytes(width) * ranks * tokens * model.dimensions.hidden_size
    return replace(
        traced,
        loss_forward_peak_bytes=forward,
        loss_kept_bytes=0,
        loss_backward_peak_bytes=max(backward, norm),
        loss_tiles=tiles,
    )


def loss_terms(step: RankStep) -> dict[Moment, Terms]:
    """Return the named bytes of head and loss; a chunked and a distillation loss compute the head's gradient early."""
    layout, model, job, traced = step.layout, step.model, step.job, step.traced
    if not step.share.has_head:
        return at_moments({})
    if any(second.role == "teacher" for second in job.second_models):
        return distillation_loss_terms(layout, model, job)
    tiles, more = traced.loss_tiles, Terms()
    tokens = step.tokens // step.ranks
    all_logits = job.compute_bytes * tokens * model.dimensions.vocab_size
    backward = traced.loss_backward_peak_bytes // step.ranks
    if job.loss == "chunked" and job.method == "full":
        width = 2 if step.mode == "bf16" else 4
        # The gradient of a single tile appears after its logits, that of later ones beside the sum of those before.
        head = width * model.embedding_parameters
        more["head_gradient"] = 0 if tiles == 1 else head
        if tiles > 1:
            hidden = width * tokens * model.dimensions.hidden_size
            backward = max(backward, hidden + head + all_logits // tiles)
    gathered: Terms = {}
    if tiles and layout.engine == "fsdp2":
        # The tiles run after the gradient has reached the unit of the head, which prefetches that of the last layer.
        gathered["gathered_parameters"] = job.compute_bytes * engine_parameters(model, job).layer_parameter_count
    return at_moments(
        {},
        forward_end=({} if tiles else more) | {"loss": traced.loss_forward_peak_bytes // step.ranks},
        loss_backward=more | gathered | {"loss": backward},
        head_backward={"loss": all_logits if job.loss != "chunked" else 0},
    )


def distillation_loss_terms(layout: Layout, model: ModelSpec, job: TrainingJob) -> dict[Moment, Terms]:
    """Return the bytes of the fused loss: temporaries, gradient of the hidden states, fp32 gradient of the head.

    The gradient of a trained head is computed in the forward pass and cast to the dtype of the weight in the backward
    pass.
    """
    (second,) = (each.spec for each in job.second_models if each.role == "teacher")
    tokens = layout.micro_batch_size * job.seq_len_tokens // (layout.sp * layout.cp)
    hidden = model.dimensions.hidden_size
    hidden_gradient = job.compute_bytes * tokens * hidden
    forward = {"loss": hidden_gradient + fused_temporary_bytes(model, second, tokens, job)}
    backward = {"loss": hidden_gradient + norm_backward_bytes(job.compute_bytes) * tokens * hidden}
    if job.method == "full":
        sixteen_bit = job.precision != "fp32" and layout.engine in ("deepspeed", "fsdp2")
        forward["head_gradient"] = 4 * model.embedding_parameters
        backward["head_gradient"] = (4 + (2 if sixteen_bit else 0)) * model.embedding_parameters
    return at_moments({}, forward_end=forward, loss_backward=backward)


def most_chunk_rows(bytes_of_a_row: int) -> int:
    """Return the number of rows whose logits of both models together fit `CHUNK_BYTES`."""
    return max(1, CHUNK_BYTES // bytes_of_a_row)


def even_chunk_rows(rows: int, most: int) -> int:
    """Return the rows of a chunk in an even split; a short last chunk would still add a complete head gradient."""
    return max(1, -(-rows // max(1, -(-rows // most))))


def block_rows(columns: int, block_bytes: int) -> int:
    return max(1, block_bytes // (4 * columns))


def fused_temporary_bytes(
    model: ModelSpec, second: ModelSpec, tokens: int, job: TrainingJob, *, block_bytes: int | None = None
) -> int:
    """Return the temporary bytes of the fused loss, with n rows per chunk and b rows per block.

    `c n V` for the logits of each model, with `12 n V` for compiled kernels. Without them, on CPU ranks with their
    `block_bytes`, `b V (49 + c + 4 [c = 2])` for a block; if less than that, the rows of the head whose gradient is
    added.
    """
    width, columns, second_columns = job.compute_bytes, model.dimensions.vocab_size, second.dimensions.vocab_size
    rows = even_chunk_rows(tokens, most_chunk_rows(width * (columns + second_columns)))
    widest, added = max(columns, second_columns), 0
    if block_bytes is None:
        elementwise = rows * widest * COMPILED_BYTES_OF_A_LOGIT
    else:
        block = min(rows, block_rows(columns, block_bytes))
        elementwise = block * widest * (_BLOCK_BYTES_OF_A_LOGIT + width + (4 if width == 2 else 0))
        adds = job.method == "full" and width == 2
        added = 4 * min(HEAD_ROWS, columns) * model.dimensions.hidden_size if adds else 0
    return _BYTES_OF_A_ROW * tokens + width * rows * columns + max(width * rows * second_columns + elementwise, added)
