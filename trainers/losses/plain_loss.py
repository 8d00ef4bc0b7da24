"""The token loss from whole logits, by autograd."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...ds_configs.specs.errors import Fault, UsageError
from ..data.chat import IGNORED_LABEL
from .divergences import divergence_rows
from .objective import LogitTargets, TokenObjective, TokenSums, TopKTargets
from .row_telemetry import dense_rows, summed, teacher_cross_entropy, top_k_rows, weighted_rows
from .top_k import check_targets, nonfinite_top_k_rows, rows_of, top_k_divergence_rows

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
    rows_by_name, divergence_N = {"student_cross_entropy": cross_entropy_N.detach()}, None
    if objective.alpha == 0.0:
        logits_NV = logits_NV.detach()
    if isinstance(teacher, LogitTargets):
        divergence_N, more = _dense(logits_NV, teacher.logits_NV.detach(), labels_N, objective, telemetry)
        rows_by_name |= more
    elif teacher is not None:
        divergence_N, more = _top_k(logits_NV, teacher, objective, telemetry)
        rows_by_name |= more
    loss_N = row_losses(cross_entropy_N, divergence_N, objective)
    shares = weighted_rows(rows_by_name, weights_N)
    return TokenSums(loss=(weights_N * loss_N).sum(), weight=weights_N.sum(), rows=shares, **summed(shares))


def row_losses(
    cross_entropy_N: torch.Tensor, divergence_N: torch.Tensor | None, objective: TokenObjective
) -> torch.Tensor:
    """Return ``(1 - α) CE + α τ² D``; a part whose weight is 0 is left out, not multiplied by 0."""
    hard_N = (1.0 - objective.alpha) * cross_entropy_N
    if divergence_N is None or objective.alpha == 0.0:
        return hard_N
    soft_N = objective.alpha * objective.temperature**2 * divergence_N
    return soft_N if objective.alpha == 1.0 else hard_N + soft_N


def valid_rows(labels_N: torch.Tensor, columns: int) -> torch.Tensor | None:
    """Return the indices of the rows with a label, or `None` where all have one.

    Raises:
        UsageError: a label is no column of the student.
    """
    valid_N = labels_N != IGNORED_LABEL
    bad_N = valid_N & ((labels_N < 0) | (labels_N >= columns))
    if bool(bad_N.any()):
        rule = f"the student's head has the columns 0 to {columns - 1}; rows without a label have {IGNORED_LABEL}"
        raise UsageError(Fault(where="labels", value=int(labels_N[bad_N][0]), rule=rule))
    rows = valid_N.nonzero().squeeze(1)
    return None if len(rows) == len(labels_N) else rows


def row_weights(labels_N: torch.Tensor, weights_N: torch.Tensor | None) -> torch.Tensor:
    """Return fp32 weights, 1 where none are given."""
    import torch

    return torch.ones_like(labels_N, dtype=torch.float32) if weights_N is None else weights_N.float()


def shared_columns(student_columns: int, teacher_columns: int, objective: TokenObjective) -> int:
    """Return V*: the tokens that both models are compared on."""
    return min(student_columns, teacher_columns, objective.vocab_size or student_columns)


def nonfinite_rows(log_p_NV: torch.Tensor) -> torch.Tensor:
    """Return 1 for rows whose teacher logits held NaN or infinity: a log-softmax makes NaN of the whole row."""
    import torch

    return torch.isnan(log_p_NV[:, 0]).float()


def _teacher_rows(teacher: LogitTargets | TopKTargets | None, rows: torch.Tensor) -> LogitTargets | TopKTargets | None:
    if isinstance(teacher, LogitTargets):
        return LogitTargets(logits_NV=teacher.logits_NV[rows])
    return None if teacher is None else rows_of(teacher, rows)


def _dense(
    logits_NV: torch.Tensor,
    taught_NV: torch.Tensor,
    labels_N: torch.Tensor,
    objective: TokenObjective,
    telemetry: bool,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    import torch

    columns = shared_columns(logits_NV.shape[1], taught_NV.shape[1], objective)
    every_NV, own_NV, taught_NV = taught_NV, logits_NV[:, :columns], taught_NV[:, :columns].float()
    log_q_NV = torch.log_softmax(own_NV / objective.temperature, dim=-1)
    log_p_NV = torch.log_softmax(taught_NV / objective.temperature, dim=-1)
    divergence_N = divergence_rows(objective.divergence, log_q_NV, log_p_NV, objective.mixture)
    rows = {"divergence": divergence_N.detach(), "nonfinite_teacher_rows": nonfinite_rows(log_p_NV)}
    if telemetry:
        with torch.no_grad():
            at_one = objective.temperature == 1.0
            pair = (log_q_NV, log_p_NV) if at_one else (own_NV.log_softmax(dim=-1), taught_NV.log_softmax(dim=-1))
            known_N = rows["divergence"] if at_one and objective.divergence == "forward_kl" else None
            rows |= dense_rows(*pair, forward_kl_N=known_N)
            whole_NV = pair[1] if columns == every_NV.shape[1] else every_NV.float().log_softmax(dim=-1)
            rows["teacher_cross_entropy"] = teacher_cross_entropy(whole_NV, labels_N)
    return divergence_N, rows


def _top_k(
    logits_NV: torch.Tensor, teacher: TopKTargets, objective: TokenObjective, telemetry: bool
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    import torch

    columns = shared_columns(logits_NV.shape[1], logits_NV.shape[1], objective)
    check_targets(teacher, objective, columns)
    log_q_NV = torch.log_softmax(logits_NV[:, :columns] / objective.temperature, dim=-1)
    divergence_N = top_k_divergence_rows(objective.divergence, log_q_NV, teacher, objective.mixture)
    rows = {"divergence": divergence_N.detach(), "nonfinite_teacher_rows": nonfinite_top_k_rows(teacher)}
    if telemetry:
        with torch.no_grad():
            rows |= top_k_rows(log_q_NV, teacher)
    return divergence_N, rows
