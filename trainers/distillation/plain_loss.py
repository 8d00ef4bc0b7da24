"""The token loss from whole logits, by autograd."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...ds_configs.errors import Fault, UsageError
from .divergences import divergence_rows
from .objective import IGNORED_LABEL, LogitTargets, TokenObjective, TokenSums, TopKTargets
from .row_telemetry import add_dense, add_top_k
from .top_k import check_temperature, rows_of, top_k_divergence_rows

if TYPE_CHECKING:
    import torch


def plain_token_loss(
    student_logits_NV: torch.Tensor,
    labels_N: torch.Tensor,
    teacher: LogitTargets | TopKTargets | None,
    objective: TokenObjective,
    *,
    weights_N: torch.Tensor | None = None,
    telemetry: bool = True,
) -> TokenSums:
    """Return ``Σ w ((1 - α) CE + α τ² D)`` over the rows whose label is not -100, in fp32 whatever the logits' dtype.

    D compares the first V* columns of both models, those of the tokens that both have; CE is over all columns of the
    student. Without a teacher the loss is ``Σ w (1 - α) CE``. Without any valid row it is 0, with a graph.

    Raises:
        UsageError: a label is beyond the student's vocabulary, or top-k targets are for another temperature.
    """
    import torch

    rows = valid_rows(labels_N, student_logits_NV.shape[1])
    weights_N = row_weights(labels_N, weights_N)
    if rows is not None:
        student_logits_NV, labels_N, weights_N = student_logits_NV[rows], labels_N[rows], weights_N[rows]
        teacher = _teacher_rows(teacher, rows)
    logits_NV = student_logits_NV.float()
    cross_entropy_N = torch.nn.functional.cross_entropy(logits_NV, labels_N, reduction="none")
    loss = (1.0 - objective.alpha) * (weights_N * cross_entropy_N).sum()
    sums = {"student_cross_entropy": (weights_N * cross_entropy_N.detach()).sum(), "weight": weights_N.sum()}
    if isinstance(teacher, LogitTargets):
        divergence_N = _dense(logits_NV, teacher.logits_NV.float(), labels_N, weights_N, objective, sums, telemetry)
    elif teacher is not None:
        check_temperature(teacher, objective)
        divergence_N = _top_k(logits_NV, teacher, weights_N, objective, sums, telemetry)
    else:
        return TokenSums(loss=loss, **sums)
    divergence = (weights_N * divergence_N).sum()
    sums["divergence"] = divergence.detach()
    loss = loss + objective.alpha * objective.temperature**2 * divergence
    return TokenSums(loss=loss, **sums)


def valid_rows(labels_N: torch.Tensor, columns: int) -> torch.Tensor | None:
    """Return the indices of the rows with a label, or `None` where all have one.

    Raises:
        UsageError: a label is no column of the student.
    """
    if labels_N.numel() and int(labels_N.max()) >= columns:
        rule = f"the student's head has {columns} columns"
        raise UsageError(Fault(where="labels", value=int(labels_N.max()), rule=rule))
    valid_N = labels_N != IGNORED_LABEL
    return None if bool(valid_N.all()) else valid_N.nonzero().squeeze(1)


def row_weights(labels_N: torch.Tensor, weights_N: torch.Tensor | None) -> torch.Tensor:
    """Return fp32 weights, 1 where none are given."""
    import torch

    return torch.ones_like(labels_N, dtype=torch.float32) if weights_N is None else weights_N.float()


def shared_columns(student_columns: int, teacher_columns: int, objective: TokenObjective) -> int:
    """Return V*: the tokens that both models are compared on."""
    return min(student_columns, teacher_columns, objective.vocab_size or student_columns)


def count_nonfinite(logits_NV: torch.Tensor) -> torch.Tensor:
    """Return the number of rows whose teacher logits are not numbers, from one reduction of each row."""
    import torch

    return (~torch.isfinite(torch.logsumexp(logits_NV, dim=-1))).sum().float()


def _teacher_rows(teacher: LogitTargets | TopKTargets | None, rows: torch.Tensor) -> LogitTargets | TopKTargets | None:
    if isinstance(teacher, LogitTargets):
        return LogitTargets(logits_NV=teacher.logits_NV[rows])
    return None if teacher is None else rows_of(teacher, rows)


def _dense(
    logits_NV: torch.Tensor,
    taught_NV: torch.Tensor,
    labels_N: torch.Tensor,
    weights_N: torch.Tensor,
    objective: TokenObjective,
    sums: dict[str, torch.Tensor],
    telemetry: bool,
) -> torch.Tensor:
    import torch

    columns = shared_columns(logits_NV.shape[1], taught_NV.shape[1], objective)
    own_NV, taught_NV = logits_NV[:, :columns], taught_NV[:, :columns].detach()
    sums["nonfinite_teacher_rows"] = count_nonfinite(taught_NV)
    log_q_NV = torch.log_softmax(own_NV / objective.temperature, dim=-1)
    log_p_NV = torch.log_softmax(taught_NV / objective.temperature, dim=-1)
    if telemetry:
        with torch.no_grad():
            at_one = objective.temperature == 1.0
            pair = (log_q_NV, log_p_NV) if at_one else (own_NV.log_softmax(dim=-1), taught_NV.log_softmax(dim=-1))
            add_dense(sums, *pair, labels_N, weights_N)
    return divergence_rows(objective.divergence, log_q_NV, log_p_NV, objective.mixture)


def _top_k(
    logits_NV: torch.Tensor,
    teacher: TopKTargets,
    weights_N: torch.Tensor,
    objective: TokenObjective,
    sums: dict[str, torch.Tensor],
    telemetry: bool,
) -> torch.Tensor:
    import torch

    columns = shared_columns(logits_NV.shape[1], logits_NV.shape[1], objective)
    log_q_NV = torch.log_softmax(logits_NV[:, :columns] / objective.temperature, dim=-1)
    sums["nonfinite_teacher_rows"] = (~torch.isfinite(teacher.log_probabilities_NK.sum(dim=-1))).sum().float()
    if telemetry:
        with torch.no_grad():
            add_top_k(sums, log_q_NV, teacher, weights_N)
    return top_k_divergence_rows(objective.divergence, log_q_NV, teacher, objective.mixture)
