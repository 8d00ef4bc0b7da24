"""Memory of head and loss: the eager loss, chunked and tiled ones, and the fused loss of distillation.

The fused loss computes the logits of a chunk of rows, so no [tokens × vocabulary] tensor of either model exists
(`trainers/losses/fused_loss.py`).
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import NamedTuple

from ..specs.job import TrainingJob
from ..specs.layout import Layout
from ..specs.model import ModelSpec
from ..specs.tasks import TASKS, Head
from ..specs.terms import Term
from .activations import ActivationEstimate, activation_mode, loss_tiles, norm_backward_bytes
from .rank_parameters import Moment, RankStep, Terms, at_moments, engine_parameters

TERMS = (
    Term(
        "loss",
        "logits, their fp32 copy and the gradients of head and loss at their joint peak; in distillation "
        "those of a chunk of rows, and with a chunked loss those of a chunk or tile",
        role="activations",
    ),
    Term(
        "head_gradient",
        "gradient of the output head, which a chunked loss computes early; fp32 in distillation or with a fused head",
        role="gradients",
    ),
)

FUSED_TOKENS, FUSED_COLUMNS = 4096, 32768
"""Tile of TRL's fused head: tokens and columns of the vocabulary (trl 1.16.0, kernels/chunked_logprob.py
`TOKEN_CHUNK_SIZE`, trainer/utils.py `_CHUNKED_LOGPROB_CHUNK_SIZE`). Its buffer has all columns whatever the model
has."""

_FUSED_STATISTICS = 7 * 4
"""Bytes per token of the fp32 statistics that the forward pass of the fused head folds tiles into."""

_FUSED_KEPT = 8 + 2 * 4 + 4 * 4
"""Bytes per token that it keeps: the label, two saved statistics, and up to four outputs."""

_FUSED_FORWARD_LOGIT, _FUSED_BACKWARD_LOGIT = 3 * 4, 5 * 4 + 1 + 2 * 4
"""Bytes per logit of a tile without Triton: fp32 temporaries of `_forward_tile` and `_backward_tile`."""

CHUNK_BYTES = 512 * 2**20
"""Largest size of the logits of both heads that the fused loss computes at a time."""

BLOCK_BYTES = 32 * 2**20
"""Largest fp32 tensor of logits rows that it processes at a time on an accelerator, if kernels cannot be compiled."""

CPU_BLOCK_BYTES = 4 * 2**20
"""The same on a CPU, whose cache is small."""

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
        loss_backward_peak_bytes=max(backward, norm),
        loss_tiles=tiles,
    )


def loss_terms(step: RankStep) -> dict[Moment, Terms]:
    """Return the named bytes of head and loss; a chunked and a distillation loss compute the head's gradient early."""
    layout, model, job, traced = step.layout, step.model, step.job, step.traced
    if not step.share.has_head:
        return at_moments({})
    reads = loss_head(model, job)
    if reads != "model":
        ahead, _, back = head_bytes(layout, model, job, element=step.element_bytes, on_gpu=step.on_gpu)
        gradient = {"head_gradient": back.head_gradient} if back.head_gradient else {}
        return at_moments({}, forward_end={"loss": ahead}, loss_backward=gradient | {"loss": back.others})
    if job.imitated is not None:
        return distillation_loss_terms(layout, model, job.imitated, job, on_gpu=step.on_gpu)
    tiles, more = traced.loss_tiles, Terms()
    tokens = step.tokens // step.ranks
    all_logits = job.compute_bytes * tokens * model.dimensions.vocab_size
    backward = traced.loss_backward_peak_bytes // step.ranks
    if job.loss == "chunked" and job.method == "full":
        # The gradient of a single tile appears after its logits, that of later ones beside the sum of those before.
        head = step.element_bytes * model.embedding_parameters
        more["head_gradient"] = 0 if tiles == 1 else head
        if tiles > 1:
            hidden = step.element_bytes * tokens * model.dimensions.hidden_size
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


class HeadBackward(NamedTuple):
    """Bytes of the backward pass of a task's head and loss at its fullest moment."""

    others: int
    head_gradient: int
    """Of the fused head, whose gradient is summed in fp32 and then cast to the type of the weight."""


def loss_head(model: ModelSpec, job: TrainingJob) -> Head:
    """Return how the loss of a job reads a model's output; `eager` asks for the complete logits of older TRL."""
    if model.has_score_head:
        return "score"
    head = TASKS[job.task].head
    return "logits" if head == "fused" and job.loss == "eager" else head


def head_bytes(
    layout: Layout, model: ModelSpec, job: TrainingJob, *, element: int, on_gpu: bool, scores: bool = False
) -> tuple[int, int, HeadBackward]:
    """Return the bytes of head and loss of a task: at most in the forward pass, kept after it, at most in the backward.

    They are beyond what the layers and the final norm keep. With `scores`, the forward pass has no gradients. With n
    scored of N tokens, width h, V columns, `e` bytes of a hidden state (`element`), `w` bytes of the compute type and
    tiles of t = min(n, 4096) tokens:

    fused (trl 1.16.0, kernels/chunked_logprob.py): a copy of the scored states, `e n h`, for the output of the norm,
    `e N h`; a buffer of `32768 w t`; statistics of 28 n. The backward pass sums both gradients in fp32, `4 n h` and
    `4 V h`, with the buffer, or casts them afterwards. Without Triton a tile has fp32 temporaries.

    logits (`get_batch_logps` of ORPOTrainer and CPOTrainer): the logits, their log-softmax and that of the preferred
    half, `2.5 a N V` with `a` bytes of a logit, which autocast makes fp32. With the gradients `3.5 a N V` with Triton;
    elsewhere, as metered, `3 a N V` in 16 bit and `4.5 a N V` in fp32, which another function computes.

    logits of trl 1.14.2, which `eager` asks for in a task with a fused head: Accelerate makes the logits fp32 unless
    DeepSpeed runs the model, `2 N V` before and `4 N V` after, and Triton keeps them alone for their gradient. In the
    forward pass DPO copies half of them for a metric, KTO all and then half; the reference's pass does so while those
    of the trained model exist. RLOO scores a micro-batch while the logits of the one before exist (line 987).

    divergence (`generalized_jsd_loss` of GKDTrainer), per `a N V`: logits, temperature-scaled logits and log-softmax
    of both models and what the mixture adds: 9 at most; 7 kept, and 3 gradients.

    score: the gradient of the hidden states.
    """
    head = loss_head(model, job)
    tokens = layout.micro_batch_size * job.seq_len_tokens // (layout.sp * layout.cp)
    hidden, columns = model.dimensions.hidden_size, model.dimensions.vocab_size
    norm = norm_backward_bytes(element) * tokens * hidden
    width = job.compute_bytes
    if head == "score":
        return element * layout.micro_batch_size, 0, HeadBackward(norm, 0)
    if head == "logits" and TASKS[job.task].head == "fused":
        final = 2 if layout.engine == "deepspeed" and width == 2 else 4
        generates = TASKS[job.task].generates
        if generates and job.completion_tokens is not None:
            tokens = min(tokens, layout.micro_batch_size * (job.completion_tokens + 1))
        logits, converted = final * tokens * columns, (width if width < final else 0) * tokens * columns
        copied = {"dpo": logits // 2, "kto": 3 * logits // 2}.get(job.task, 0)
        repeats = (job.steps_per_generation or layout.gradient_accumulation_steps) > 1
        before = logits if scores and generates and repeats else 0
        return before + logits + max(converted, copied), logits, HeadBackward(max(2 * logits, norm), 0)
    if head in ("logits", "divergence"):
        logits = element * tokens * columns
        converted = width * tokens * columns if width < element else 0
        in_pairs = 7 if on_gpu else 6 if element == 2 else 9
        forward, kept, backward = (5, 3, in_pairs) if head == "logits" else (18, 14, 20)
        most = max(forward * logits // 2, logits + converted)
        return most, kept * logits // 2, HeadBackward(max(backward * logits // 2, norm), 0)
    # With Triton the fused head reads the hidden states of completions only (trl 1.16.0, `add_fused_lm_head`), of which
    # no length is known unless the job limits them; elsewhere of every token but the first.
    length = job.seq_len_tokens - 1
    if on_gpu and job.completion_tokens is not None:
        length = min(length, job.completion_tokens)
    scored = max(1, layout.micro_batch_size * length // (layout.sp * layout.cp))
    rows, tile_columns = min(scored, FUSED_TOKENS), min(columns, FUSED_COLUMNS)
    copied = element * scored * hidden if on_gpu or layout.micro_batch_size > 1 else 0
    buffer = width * rows * FUSED_COLUMNS
    casts = width * (rows + tile_columns) * hidden if width < element else 0
    forward_tile = 0 if on_gpu else _FUSED_FORWARD_LOGIT * rows * tile_columns
    kept = _FUSED_KEPT * scored + max(0, copied - (element * tokens * hidden if copied else 0))
    forward = copied + (_FUSED_STATISTICS + 8) * scored + buffer + casts + forward_tile
    trained = job.method == "full"
    state_gradient = 4 * scored * hidden
    head_gradient = 4 * model.embedding_parameters if trained else 0
    cast_gradient = element * model.embedding_parameters if trained and element < 4 else 0
    inside = buffer + casts
    if not on_gpu:
        products = 4 * (rows * tile_columns + tile_columns * hidden) if width == 2 else 0
        inside += max(_FUSED_BACKWARD_LOGIT * rows * tile_columns, products)
    ended = (element * scored * hidden if element < 4 else 0) + cast_gradient
    backward = kept + state_gradient + max(inside, ended)
    return forward, kept, HeadBackward(max(backward, norm), head_gradient)


def distillation_loss_terms(
    layout: Layout, model: ModelSpec, imitated: ModelSpec, job: TrainingJob, *, on_gpu: bool = True
) -> dict[Moment, Terms]:
    """Return the bytes of the fused loss: temporaries, gradient of the hidden states, fp32 gradient of the head.

    The gradient of a trained head is computed in the forward pass. The backward pass casts it to the dtype of the
    weight within its memory.
    """
    tokens = layout.micro_batch_size * job.seq_len_tokens // (layout.sp * layout.cp)
    hidden = model.dimensions.hidden_size
    hidden_gradient = job.compute_bytes * tokens * hidden
    block_bytes = None if on_gpu else CPU_BLOCK_BYTES
    forward = {"loss": hidden_gradient + fused_temporary_bytes(model, imitated, tokens, job, block_bytes=block_bytes)}
    backward = {"loss": hidden_gradient + norm_backward_bytes(job.compute_bytes) * tokens * hidden}
    if job.method == "full":
        forward["head_gradient"] = backward["head_gradient"] = 4 * model.embedding_parameters
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

    `c n V` for the logits of each model; compiled kernels store no others. Without them, on CPU ranks with their
    `block_bytes`, `b V (49 + c + 4 [c = 2])` for a block; if less than that, the rows of the head whose gradient is
    added.
    """
    width, columns, second_columns = job.compute_bytes, model.dimensions.vocab_size, second.dimensions.vocab_size
    rows = even_chunk_rows(tokens, most_chunk_rows(width * (columns + second_columns)))
    widest, added = max(columns, second_columns), 0
    elementwise = 0
    if block_bytes is not None:
        block = min(rows, block_rows(columns, block_bytes))
        elementwise = block * widest * (_BLOCK_BYTES_OF_A_LOGIT + width + (4 if width == 2 else 0))
        adds = job.method == "full" and width == 2
        added = 4 * min(HEAD_ROWS, columns) * model.dimensions.hidden_size if adds else 0
    return _BYTES_OF_A_ROW * tokens + width * rows * columns + max(width * rows * second_columns + elementwise, added)
