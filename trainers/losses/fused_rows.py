"""The token loss of some rows and its gradient, by formulas: what the fused loss repeats.

The elementwise work goes over a few rows at a time, so that its fp32 temporaries stay small, and on a CPU in the cache.
Shapes: n rows of one chunk, b rows of one block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...plugins.transformers.output_heads import OutputHead
from .divergences import divergence_and_gradient, divergence_rows
from .objective import LogitTargets, TeacherTargets, TokenObjective, TopKTargets
from .plain_loss import nonfinite_rows, shared_columns
from .row_telemetry import dense_rows, teacher_cross_entropy, top_k_rows
from .top_k import nonfinite_top_k_rows, rows_of, top_k_divergence_and_gradient, top_k_divergence_rows

if TYPE_CHECKING:
    import torch

_Rows = dict[str, "torch.Tensor"]


@dataclass(frozen=True, kw_only=True)
class RowWork:
    """Work done to every row."""

    head: OutputHead
    """The student's head, whose scale and soft-cap shape what the product gives."""
    objective: TokenObjective
    telemetry: bool
    gradient: bool
    """Whether the product is to be overwritten with the loss's gradient with respect to it."""
    gradient_scale: float = 1.0
    """Multiplies that gradient, so that small ones do not vanish in fp16."""
    block_rows: int
    """Rows b of one block."""


def chunk_rows_and_gradient(
    product_nV: torch.Tensor,
    labels_n: torch.Tensor,
    weights_n: torch.Tensor,
    teacher: TeacherTargets | None,
    work: RowWork,
) -> list[_Rows]:
    """Return the values of each block's rows by name; overwrites ``h Wᵀ + b`` with the gradient of Σ w · loss.

    A `HiddenTargets` teacher's product exists for all n rows, in the dtype of its head.
    """
    import torch

    taught_nV = None
    if teacher is not None and not isinstance(teacher, LogitTargets | TopKTargets):
        own = teacher.head
        hidden = teacher.hidden_NH.to(own.weight_VH.dtype)
        taught_nV = torch.nn.functional.linear(hidden, own.weight_VH, own.bias_V)
    values = []
    for first in range(0, len(product_nV), work.block_rows):
        block = slice(first, first + work.block_rows)
        targets: torch.Tensor | TopKTargets | None = None
        if taught_nV is not None:
            targets = teacher.head.shaped(taught_nV[block])  # type: ignore[union-attr]
        elif isinstance(teacher, LogitTargets):
            targets = teacher.logits_NV[block]
        elif isinstance(teacher, TopKTargets):
            targets = rows_of(teacher, block)
        values.append(_block(product_nV[block], labels_n[block], weights_n[block], targets, work))
    return values


def _block(
    product_bV: torch.Tensor,
    labels_b: torch.Tensor,
    weights_b: torch.Tensor,
    targets: torch.Tensor | TopKTargets | None,
    work: RowWork,
) -> _Rows:
    import torch

    objective = work.objective
    logits = work.head.shaped(product_bV).float()
    log_q = torch.log_softmax(logits, dim=-1)
    rows = {"student_cross_entropy": -log_q.gather(1, labels_b[:, None]).squeeze(1)}
    soft = None
    if targets is not None:
        more, soft = _soft(logits, log_q, targets, labels_b, work)
        rows |= more
    if not work.gradient:
        return rows
    slope = None
    if work.head.soft_cap is not None:
        slope = (logits / work.head.soft_cap).square_().neg_().add_(1.0)
    scaled_b = weights_b * (work.gradient_scale * work.head.scale)
    dz = log_q.exp_()
    dz.scatter_add_(1, labels_b[:, None], dz.new_full((len(dz), 1), -1.0))
    dz.mul_((scaled_b * (1.0 - objective.alpha))[:, None])
    if soft is not None:
        soft.mul_((scaled_b * (objective.alpha * objective.temperature))[:, None])
        dz[:, : soft.shape[1]] += soft
    if slope is not None:
        dz.mul_(slope)
    product_bV.copy_(dz)
    return rows


def _soft(
    logits: torch.Tensor,
    log_q_at_one: torch.Tensor,
    targets: torch.Tensor | TopKTargets,
    labels_b: torch.Tensor,
    work: RowWork,
) -> tuple[_Rows, torch.Tensor | None]:
    """Return the divergence and what it tells, and its gradient with respect to logits / τ on the shared columns."""
    import torch

    objective = work.objective
    taught_columns = logits.shape[1] if isinstance(targets, TopKTargets) else targets.shape[1]
    columns = shared_columns(logits.shape[1], taught_columns, objective)
    at_one = objective.temperature == 1.0
    log_q = log_q_at_one
    if not at_one or columns != logits.shape[1]:
        log_q = torch.log_softmax(logits[:, :columns] / objective.temperature, dim=-1)
    gradient = work.gradient and objective.alpha != 0.0
    if isinstance(targets, TopKTargets):
        divergence_b, soft = _top_k_soft(log_q, targets, objective, gradient)
        rows = {"divergence": divergence_b, "nonfinite_teacher_rows": nonfinite_top_k_rows(targets)}
        return rows | (top_k_rows(log_q, targets) if work.telemetry else {}), soft
    taught = targets[:, :columns].float()
    log_p = torch.log_softmax(taught / objective.temperature, dim=-1)
    soft = None
    if gradient:
        divergence_b, soft = divergence_and_gradient(objective.divergence, log_q, log_p, objective.mixture)
    else:
        divergence_b = divergence_rows(objective.divergence, log_q, log_p, objective.mixture)
    rows = {"divergence": divergence_b, "nonfinite_teacher_rows": nonfinite_rows(log_p)}
    if not work.telemetry:
        return rows, soft
    known = divergence_b if at_one and objective.divergence == "forward_kl" else None
    own, theirs = log_q, log_p
    if not at_one:
        own = log_q_at_one if columns == logits.shape[1] else logits[:, :columns].log_softmax(dim=-1)
        theirs = taught.log_softmax(dim=-1)
    rows |= dense_rows(own, theirs, forward_kl_N=known)
    whole = theirs if columns == targets.shape[1] else targets.float().log_softmax(dim=-1)
    return rows | {"teacher_cross_entropy": teacher_cross_entropy(whole, labels_b)}, soft


def _top_k_soft(
    log_q: torch.Tensor, targets: TopKTargets, objective: TokenObjective, gradient: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if gradient:
        return top_k_divergence_and_gradient(objective.divergence, log_q, targets, objective.mixture)
    return top_k_divergence_rows(objective.divergence, log_q, targets, objective.mixture), None
