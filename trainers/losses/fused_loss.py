"""The token loss from hidden states and heads, chunk by chunk: no [tokens × vocabulary] of either model exists.

The gradient is computed in the forward pass, by the formulas of `divergence_and_gradient`, and scaled in the backward
pass. It equals what autograd makes of the whole logits: the products run in the same dtype and order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from ...ds_configs.memory.distillation_memory import BLOCK_BYTES as ACCELERATOR_BLOCK_BYTES
from ...ds_configs.memory.distillation_memory import HEAD_ROWS, block_rows, even_chunk_rows, most_chunk_rows
from ...plugins.transformers.output_heads import OutputHead
from .fused_rows import RowWork, chunk_rows_and_gradient
from .objective import HiddenTargets, LogitTargets, TeacherTargets, TokenObjective, TokenSums, TopKTargets
from .plain_loss import row_losses, row_weights, shared_columns, valid_rows
from .row_telemetry import summed, weighted_rows
from .top_k import check_targets, rows_of

if TYPE_CHECKING:
    import torch

BLOCK_BYTES = {"cpu": 4 * 2**20, "cuda": ACCELERATOR_BLOCK_BYTES}
"""One fp32 temporary of a block stays below this: small for a CPU's cache, large enough to keep a GPU busy."""
SCALED_ROWS = 1024
"""Rows of a 16-bit gradient that are multiplied at once in the backward pass."""
_FP16_GRADIENT_SCALE = 256.0
"""A gradient of 1e-6, which fp16 keeps two digits of, has a full significand at this scale."""


def fused_token_loss(
    student_hidden_NH: torch.Tensor,
    student_head: OutputHead,
    labels_N: torch.Tensor,
    teacher: TeacherTargets | None,
    objective: TokenObjective,
    *,
    weights_N: torch.Tensor | None = None,
    chunk_rows: int | None = None,
    telemetry: bool = True,
) -> TokenSums:
    """Return what `plain_token_loss` returns of the heads' logits, without ever holding the logits of all rows.

    `chunk_rows` rows are worked on at a time; `None` keeps their logits below half a gigabyte. The gradient of a head
    whose weight needs none is not computed, and no gradient at all where autograd is off.

    Raises:
        UsageError: a label is beyond the student's vocabulary, or top-k targets are for another temperature.
    """
    import torch

    rows = valid_rows(labels_N, student_head.vocab_size)
    weights_N = row_weights(labels_N, weights_N)
    if rows is not None:
        student_hidden_NH, labels_N, weights_N = student_hidden_NH[rows], labels_N[rows], weights_N[rows]
        teacher = None if teacher is None else _rows_of(teacher, rows)
    if isinstance(teacher, TopKTargets):
        columns = shared_columns(student_head.vocab_size, student_head.vocab_size, objective)
        check_targets(teacher, objective, columns)
    dtype = _compute_dtype(student_hidden_NH)
    work = _Work(
        head=student_head,
        labels_N=labels_N,
        weights_N=weights_N,
        teacher=teacher,
        objective=objective,
        chunk_rows=chunk_rows or most_chunk_rows(student_head.vocab_size * dtype.itemsize + _taught_bytes(teacher)),
        telemetry=telemetry,
        dtype=dtype,
        differentiates=torch.is_grad_enabled(),
    )
    loss = _autograd_function().apply(student_hidden_NH, student_head.weight_VH, student_head.bias_V, work)
    return TokenSums(loss=loss, weight=weights_N.sum(), rows=work.rows, **summed(work.rows))


@dataclass(kw_only=True)
class _Work:
    """Inputs of the loop over chunks, and what it leaves of each row."""

    head: OutputHead
    labels_N: torch.Tensor
    weights_N: torch.Tensor
    teacher: TeacherTargets | None
    objective: TokenObjective
    chunk_rows: int
    telemetry: bool
    dtype: torch.dtype
    differentiates: bool
    rows: dict[str, torch.Tensor] = field(default_factory=dict)

    def chunks(self) -> Iterator[slice]:
        count = len(self.labels_N)
        size = even_chunk_rows(count, self.chunk_rows)
        for first in range(0, count, size):
            yield slice(first, first + size)

    def row_work(self, *, gradient: bool) -> RowWork:
        import torch

        return RowWork(
            head=self.head,
            objective=self.objective,
            telemetry=self.telemetry,
            gradient=gradient,
            gradient_scale=_FP16_GRADIENT_SCALE if self.dtype == torch.float16 else 1.0,
            block_rows=block_rows(
                self.head.vocab_size, BLOCK_BYTES.get(self.labels_N.device.type, ACCELERATOR_BLOCK_BYTES)
            ),
        )


@cache
def _autograd_function() -> Any:
    """The class exists once torch is loaded, which importing this module does not do."""
    import torch
    from torch.autograd.function import once_differentiable

    members = {"forward": staticmethod(_forward), "backward": staticmethod(once_differentiable(_backward))}
    return type("FusedTokenLoss", (torch.autograd.Function,), members)


def _forward(
    ctx: Any, hidden_NH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None, work: _Work
) -> torch.Tensor:
    import torch

    needs = [work.differentiates and needed for needed in ctx.needs_input_grad[:3]]
    row_work = work.row_work(gradient=any(needs))
    waiting = _empty_gradients(hidden_NH, weight_VH, bias_V, work.dtype, needs)
    ctx.waiting, ctx.dtypes = waiting, [None if t is None else t.dtype for t in (hidden_NH, weight_VH, bias_V)]
    ctx.scale = 1.0 / row_work.gradient_scale
    values: list[dict[str, torch.Tensor]] = []
    with torch.autocast(hidden_NH.device.type, enabled=False):
        cast_VH = weight_VH.to(work.dtype)
        cast_V = None if bias_V is None else bias_V.to(work.dtype)
        for chunk in work.chunks():
            hidden = hidden_NH[chunk].to(work.dtype)
            product = torch.nn.functional.linear(hidden, cast_VH, cast_V)
            targets = None if work.teacher is None else _rows_of(work.teacher, chunk)
            values += chunk_rows_and_gradient(product, work.labels_N[chunk], work.weights_N[chunk], targets, row_work)
            _add_gradients(waiting, product, hidden, cast_VH, chunk)
            del product
    rows_N = {name: torch.cat([block[name] for block in values]) for name in (values[0] if values else ())}
    work.rows.update(weighted_rows(rows_N, work.weights_N))
    if not values:
        return hidden_NH.new_zeros((), dtype=torch.float32)
    loss_N = row_losses(rows_N["student_cross_entropy"], rows_N.get("divergence"), work.objective)
    return (work.weights_N * loss_N).sum()


def _empty_gradients(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    dtype: torch.dtype,
    needs: list[bool],
) -> list[torch.Tensor | None]:
    import torch

    return [
        torch.empty(hidden_NH.shape, dtype=dtype, device=hidden_NH.device) if needs[0] else None,
        torch.zeros_like(weight_VH, dtype=torch.float32) if needs[1] else None,
        torch.zeros_like(bias_V, dtype=torch.float32) if needs[2] else None,
    ]


def _add_gradients(
    waiting: list[torch.Tensor | None],
    dz_nV: torch.Tensor,
    hidden_nH: torch.Tensor,
    weight_VH: torch.Tensor,
    chunk: slice,
) -> None:
    """Add what one chunk gives: dh = dz W, dW += dzᵀ h and db += Σ dz, the sums over chunks in fp32."""
    import torch

    hidden_gradient, weight_gradient, bias_gradient = waiting
    if hidden_gradient is not None:
        torch.mm(dz_nV, weight_VH, out=hidden_gradient[chunk])
    if bias_gradient is not None:
        bias_gradient += dz_nV.sum(dim=0, dtype=torch.float32)
    if weight_gradient is None:
        return
    if dz_nV.dtype == torch.float32:
        weight_gradient.addmm_(dz_nV.T, hidden_nH)
        return
    for first in range(0, weight_gradient.shape[0], HEAD_ROWS):
        rows = slice(first, first + HEAD_ROWS)
        if dz_nV.is_cuda:
            weight_gradient[rows] += torch.mm(dz_nV[:, rows].T, hidden_nH, out_dtype=torch.float32)
        else:
            weight_gradient[rows] += dz_nV[:, rows].T @ hidden_nH


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    if ctx.waiting is None:
        raise RuntimeError("the fused loss frees its gradients in the first backward pass; there is no second one")
    waiting, ctx.waiting = ctx.waiting, None
    factor = gradient.float() * ctx.scale
    scaled: list[torch.Tensor | None] = []
    for index, dtype in enumerate(ctx.dtypes):
        own, waiting[index] = waiting[index], None
        scaled.append(None if own is None else _scaled(own, factor).to(dtype))
    return (*scaled, None)


def _scaled(own: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Multiply in place, in fp32: a factor such as 1 / tokens rounded to 16 bit would be off for every gradient."""
    import torch

    if own.dtype == torch.float32:
        return own.mul_(factor)
    for rows in own.split(SCALED_ROWS):
        rows.copy_(rows.float().mul_(factor))
    return own


def _compute_dtype(hidden_NH: torch.Tensor) -> torch.dtype:
    """The dtype of the head's product: that of the hidden states, or autocast's."""
    import torch

    kind = hidden_NH.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_NH.dtype


def _taught_bytes(teacher: TeacherTargets | None) -> int:
    """Bytes of the logits of one row that the loss makes for the teacher."""
    if not isinstance(teacher, HiddenTargets):
        return 0
    return int(teacher.head.vocab_size * teacher.head.weight_VH.dtype.itemsize)


def _rows_of(teacher: TeacherTargets, rows: slice | torch.Tensor) -> TeacherTargets:
    if isinstance(teacher, HiddenTargets):
        return HiddenTargets(hidden_NH=teacher.hidden_NH[rows], head=teacher.head)
    if isinstance(teacher, LogitTargets):
        return LogitTargets(logits_NV=teacher.logits_NV[rows])
    return rows_of(teacher, rows)
