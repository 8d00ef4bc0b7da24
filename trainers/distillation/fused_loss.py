"""The token loss from hidden states and heads, chunk by chunk: no [tokens × vocabulary] of either model exists.

The gradient is computed in the forward pass, by the formulas of `divergence_and_gradient`, and scaled in the backward
pass. It equals what autograd makes of the whole logits: the products run in the same dtype and order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ...plugins.output_heads import OutputHead
from .divergences import divergence_and_gradient
from .objective import HiddenTargets, LogitTargets, TeacherTargets, TokenObjective, TokenSums, TopKTargets
from .plain_loss import count_nonfinite, row_weights, shared_columns, valid_rows
from .row_telemetry import add_dense, add_to, add_top_k
from .top_k import check_temperature, rows_of, top_k_divergence_and_gradient

if TYPE_CHECKING:
    from collections.abc import Iterator

CHUNK_BYTES = 512 * 2**20
"""fp32 temporaries of one chunk stay near this."""
_TEMPORARIES = 4
"""fp32 tensors of [rows, V] that a chunk counts on."""
_HEAD_ROWS = 8192
"""Rows of the head whose gradient is added at once."""


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

    `chunk_rows` rows are worked on at a time; `None` keeps a chunk's fp32 temporaries near half a gigabyte. The
    gradient of a head whose weight needs none is not computed.

    Raises:
        UsageError: a label is beyond the student's vocabulary, or top-k targets are for another temperature.
    """
    rows = valid_rows(labels_N, student_head.vocab_size)
    weights_N = row_weights(labels_N, weights_N)
    if rows is not None:
        student_hidden_NH, labels_N, weights_N = student_hidden_NH[rows], labels_N[rows], weights_N[rows]
        teacher = None if teacher is None else _chunk_of(teacher, rows)
    if isinstance(teacher, TopKTargets):
        check_temperature(teacher, objective)
    work = _Work(
        head=student_head,
        labels_N=labels_N,
        weights_N=weights_N,
        teacher=teacher,
        objective=objective,
        chunk_rows=chunk_rows or max(1, CHUNK_BYTES // (4 * _TEMPORARIES * student_head.vocab_size)),
        telemetry=telemetry,
        dtype=_compute_dtype(student_hidden_NH),
        differentiates=torch.is_grad_enabled(),
    )
    loss = _FusedTokenLoss.apply(student_hidden_NH, student_head.weight_VH, student_head.bias_V, work)
    return TokenSums(loss=loss, weight=weights_N.sum(), **work.sums)


def _compute_dtype(hidden_NH: torch.Tensor) -> torch.dtype:
    """The dtype of the head's product: that of the hidden states, or autocast's."""
    kind = hidden_NH.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_NH.dtype


@dataclass(kw_only=True)
class _Work:
    """What the loop over chunks reads, and the sums that it leaves."""

    head: OutputHead
    labels_N: torch.Tensor
    weights_N: torch.Tensor
    teacher: TeacherTargets | None
    objective: TokenObjective
    chunk_rows: int
    telemetry: bool
    dtype: torch.dtype
    differentiates: bool
    sums: dict[str, torch.Tensor] = field(default_factory=dict)

    def chunks(self) -> Iterator[slice]:
        for first in range(0, len(self.labels_N), self.chunk_rows):
            yield slice(first, first + self.chunk_rows)


class _FusedTokenLoss(torch.autograd.Function):
    """Loops over chunks; the gradients wait, unscaled, for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None, work: _Work
    ) -> torch.Tensor:
        needs = ctx.needs_input_grad
        any_gradient = work.differentiates and any(needs)
        with torch.autocast(hidden_NH.device.type, enabled=False):
            cast_VH = weight_VH.to(work.dtype)
            cast_V = None if bias_V is None else bias_V.to(work.dtype)
            hidden_gradient = torch.empty_like(hidden_NH) if any_gradient and needs[0] else None
            weight_gradient = torch.zeros_like(weight_VH, dtype=torch.float32) if any_gradient and needs[1] else None
            bias_gradient = torch.zeros_like(bias_V, dtype=torch.float32) if any_gradient and needs[2] else None
            loss = hidden_NH.new_zeros((), dtype=torch.float32)
            for chunk in work.chunks():
                hidden = hidden_NH[chunk].to(work.dtype)
                chunk_loss, dz = _chunk(hidden, cast_VH, cast_V, work, chunk, gradient=any_gradient)
                loss += chunk_loss
                if dz is None:
                    continue
                if hidden_gradient is not None:
                    hidden_gradient[chunk] = dz @ cast_VH
                if weight_gradient is not None:
                    _add_product(weight_gradient, dz, hidden)
                if bias_gradient is not None:
                    bias_gradient += dz.sum(dim=0, dtype=torch.float32)
        ctx.gradients = (hidden_gradient, weight_gradient, bias_gradient)
        ctx.dtypes = (hidden_NH.dtype, weight_VH.dtype, None if bias_V is None else bias_V.dtype)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the fused loss frees its gradients in the first backward pass; there is no second one")
        waiting, ctx.gradients = ctx.gradients, None
        scaled = [
            None if own is None else own.mul_(gradient.to(own.dtype)).to(dtype)
            for own, dtype in zip(waiting, ctx.dtypes, strict=True)
        ]
        return (*scaled, None)


def _add_product(weight_gradient: torch.Tensor, dz: torch.Tensor, hidden: torch.Tensor) -> None:
    """Add dzᵀ h in fp32, some rows of the head at a time: a whole product would be as large as the head."""
    if dz.dtype == torch.float32:
        weight_gradient.addmm_(dz.T, hidden)
        return
    for first in range(0, weight_gradient.shape[0], _HEAD_ROWS):
        rows = slice(first, first + _HEAD_ROWS)
        if dz.is_cuda:
            weight_gradient[rows] += torch.mm(dz[:, rows].T, hidden, out_dtype=torch.float32)
        else:
            weight_gradient[rows] += dz[:, rows].T @ hidden


def _chunk(
    hidden: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    work: _Work,
    chunk: slice,
    *,
    gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the loss of some rows and its gradient with respect to the head's product, in the product's dtype."""
    head, objective, labels, weights = work.head, work.objective, work.labels_N[chunk], work.weights_N[chunk]
    logits = head.shaped(torch.nn.functional.linear(hidden, weight_VH, bias_V)).float()
    normaliser = torch.logsumexp(logits, dim=-1)
    cross_entropy = normaliser - logits.gather(1, labels[:, None]).squeeze(1)
    add_to(work.sums, "student_cross_entropy", cross_entropy, weights)
    loss = (1.0 - objective.alpha) * (cross_entropy * weights).sum()
    taught = None
    if work.teacher is not None:
        divergence, taught = _divergence(logits, labels, weights, work, chunk)
        add_to(work.sums, "divergence", divergence, weights)
        loss = loss + objective.alpha * objective.temperature**2 * (divergence * weights).sum()
    if not gradient:
        return loss, None
    slope = None
    if head.soft_cap is not None:
        slope = (logits / head.soft_cap).square_().neg_().add_(1.0)
    dz = logits.sub_(normaliser[:, None]).exp_()
    dz[torch.arange(len(dz), device=dz.device), labels] -= 1.0
    dz.mul_((weights * (1.0 - objective.alpha))[:, None])
    if taught is not None:
        taught.mul_((weights * (objective.alpha * objective.temperature))[:, None])
        dz[:, : taught.shape[1]] += taught
    if slope is not None:
        dz.mul_(slope)
    if head.scale != 1.0:
        dz.mul_(head.scale)
    return loss, dz.to(work.dtype)


def _divergence(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, work: _Work, chunk: slice
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the divergence of some rows and its gradient with respect to logits / τ, on the shared columns."""
    assert work.teacher is not None
    objective, targets = work.objective, _chunk_of(work.teacher, chunk)
    if isinstance(targets, TopKTargets):
        columns = shared_columns(logits.shape[1], logits.shape[1], objective)
        log_q = torch.log_softmax(logits[:, :columns] / objective.temperature, dim=-1)
        bad = (~torch.isfinite(targets.log_probabilities_NK.sum(dim=-1))).sum().float()
        add_to(work.sums, "nonfinite_teacher_rows", bad, torch.ones_like(bad))
        if work.telemetry:
            add_top_k(work.sums, log_q, targets, weights)
        return top_k_divergence_and_gradient(objective.divergence, log_q, targets, objective.mixture)
    taught = _teacher_logits(targets)
    columns = shared_columns(logits.shape[1], taught.shape[1], objective)
    own, taught = logits[:, :columns], taught[:, :columns]
    bad = count_nonfinite(taught)
    add_to(work.sums, "nonfinite_teacher_rows", bad, torch.ones_like(bad))
    if work.telemetry and objective.temperature != 1.0:
        add_dense(work.sums, own.log_softmax(dim=-1), taught.log_softmax(dim=-1), labels, weights)
    log_q = torch.log_softmax(own / objective.temperature, dim=-1)
    log_p = torch.log_softmax(taught / objective.temperature, dim=-1)
    if work.telemetry and objective.temperature == 1.0:
        add_dense(work.sums, log_q, log_p, labels, weights)
    return divergence_and_gradient(objective.divergence, log_q, log_p, objective.mixture)


def _teacher_logits(targets: HiddenTargets | LogitTargets) -> torch.Tensor:
    if isinstance(targets, LogitTargets):
        return targets.logits_NV.detach().float()
    head = targets.head
    with torch.no_grad():
        return head.logits(targets.hidden_NH.to(head.weight_VH.dtype)).float()


def _chunk_of(teacher: TeacherTargets, rows: slice | torch.Tensor) -> TeacherTargets:
    if isinstance(teacher, HiddenTargets):
        return HiddenTargets(hidden_NH=teacher.hidden_NH[rows], head=teacher.head)
    if isinstance(teacher, LogitTargets):
        return LogitTargets(logits_NV=teacher.logits_NV[rows])
    return rows_of(teacher, rows)
