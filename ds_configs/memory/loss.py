"""Memory of the distillation loss, on an accelerator.

The fused loss computes the logits of a chunk of rows, so no [tokens × vocabulary] tensor of either model exists
(`trainers/losses/fused_loss.py`).
"""

from __future__ import annotations

from ..specs.job import TrainingJob
from ..specs.layout import Layout
from ..specs.model import ModelSpec
from .activations import norm_backward_bytes
from .rank_parameters import Moment, Terms, at_moments

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


def distillation_loss_terms(strategy: Layout, model: ModelSpec, job: TrainingJob) -> dict[Moment, Terms]:
    """Return the bytes of the fused loss: temporaries, gradient of the hidden states, fp32 gradient of the head.

    The gradient of a trained head is computed in the forward pass and cast to the dtype of the weight in the backward
    pass.
    """
    assert job.teacher is not None, "only distillation has this loss"
    ranks = strategy.sp * strategy.cp
    tokens = strategy.micro_batch_size * job.seq_len_tokens // ranks
    hidden = model.dimensions.hidden_size
    hidden_gradient = job.compute_bytes * tokens * hidden
    forward = {"loss": hidden_gradient + fused_temporary_bytes(model, job.teacher, tokens, job)}
    backward = {"loss": hidden_gradient + norm_backward_bytes(job.compute_bytes) * tokens * hidden}
    if job.method == "full":
        sixteen_bit = job.precision != "fp32" and strategy.engine in ("deepspeed", "fsdp2")
        forward["head_gradient"] = 4 * model.embedding_parameters
        backward["head_gradient"] = (4 + (2 if sixteen_bit else 0)) * model.embedding_parameters
    return at_moments({}, forward_end=forward, loss_backward=backward)


def most_chunk_rows(bytes_of_a_row: int) -> int:
    """Return the number of rows whose logits of student and teacher together fit `CHUNK_BYTES`."""
    return max(1, CHUNK_BYTES // bytes_of_a_row)


def even_chunk_rows(rows: int, most: int) -> int:
    """Return the rows of a chunk in an even split; a short last chunk would still add a complete head gradient."""
    return max(1, -(-rows // max(1, -(-rows // most))))


def block_rows(columns: int, block_bytes: int) -> int:
    return max(1, block_bytes // (4 * columns))


def fused_temporary_bytes(
    student: ModelSpec, teacher: ModelSpec, tokens: int, job: TrainingJob, *, block_bytes: int | None = None
) -> int:
    """Return the temporary bytes of the fused loss, with n rows per chunk and b rows per block.

    `c n V_s` for the logits of the student and `c n V_t` for the teacher, with `12 n V` for compiled kernels. Without
    them, on CPU ranks with their `block_bytes`, `b V (49 + c + 4 [c = 2])` for a block; if less than that, the rows of
    the head whose gradient is added.
    """
    width, columns, taught_columns = job.compute_bytes, student.dimensions.vocab_size, teacher.dimensions.vocab_size
    rows = even_chunk_rows(tokens, most_chunk_rows(width * (columns + taught_columns)))
    widest, added = max(columns, taught_columns), 0
    if block_bytes is None:
        elementwise = rows * widest * COMPILED_BYTES_OF_A_LOGIT
    else:
        block = min(rows, block_rows(columns, block_bytes))
        elementwise = block * widest * (_BLOCK_BYTES_OF_A_LOGIT + width + (4 if width == 2 else 0))
        adds = job.method == "full" and width == 2
        added = 4 * min(HEAD_ROWS, columns) * student.dimensions.hidden_size if adds else 0
    return _BYTES_OF_A_ROW * tokens + width * rows * columns + max(width * rows * taught_columns + elementwise, added)
