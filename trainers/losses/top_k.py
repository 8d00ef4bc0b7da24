"""A teacher's K likeliest tokens and one bin for all others.

Both distributions are compared over K + 1 bins: it is a lower bound of the divergence over all tokens, for every
f-divergence (data processing inequality), and 0 for equal models, where renormalised top-K is neither.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ...ds_configs.specs.errors import Fault, UsageError
from .divergences import LOWEST, divergence_and_gradient, divergence_rows
from .objective import Divergence, TokenObjective, TopKTargets

if TYPE_CHECKING:
    import torch


def check_targets(targets: TopKTargets, objective: TokenObjective, columns: int) -> None:
    """Refuse targets of another temperature, or with tokens beyond the columns that are compared.

    Raises:
        UsageError: one of them.
    """
    if targets.temperature != objective.temperature:
        rule = f"the teacher's top-k was taken at temperature {targets.temperature}"
        fix = "use that temperature, or take the top-k at this one"
        raise UsageError(Fault(where="temperature", value=objective.temperature, rule=rule, fix=fix))
    if targets.ids_NK.numel() and int(targets.ids_NK.max()) >= columns:
        rule = f"the teacher's top-k holds a token beyond the {columns} that are compared"
        fix = f"take the top-k with vocab_size={columns} or less"
        raise UsageError(Fault(where="ids_NK", value=int(targets.ids_NK.max()), rule=rule, fix=fix))


def nonfinite_top_k_rows(targets: TopKTargets) -> torch.Tensor:
    """Return 1 for rows with NaN or +infinity among their log-probabilities; -infinity is a mass of 0."""
    largest_N = targets.log_probabilities_NK.amax(dim=-1)
    return (~((largest_N < math.inf) & (targets.tail_log_probability_N < math.inf))).float()


def binned(log_q_NV: torch.Tensor, targets: TopKTargets) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities of student and teacher over K + 1 bins, [N, K + 1]."""
    import torch

    student = log_q_NV.gather(1, targets.ids_NK)
    tail_N = _log_tail(log_q_NV, targets.ids_NK)
    teacher = torch.cat([targets.log_probabilities_NK, targets.tail_log_probability_N[:, None]], dim=1)
    return torch.cat([student, tail_N[:, None]], dim=1), teacher


def top_k_divergence_rows(
    kind: Divergence, log_q_NV: torch.Tensor, targets: TopKTargets, mixture: float
) -> torch.Tensor:
    """Return the divergence over K + 1 bins of each row, [N], differentiable by autograd."""
    student, teacher = binned(log_q_NV, targets)
    return divergence_rows(kind, student, teacher, mixture)


def top_k_divergence_and_gradient(
    kind: Divergence, log_q_NV: torch.Tensor, targets: TopKTargets, mixture: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the divergence [N] and its gradient with respect to the student's logits [N, V], without autograd.

    A token's share of its bin's gradient is its share of the bin's mass.
    """
    student, teacher = binned(log_q_NV, targets)
    value_N, gradient_bins = divergence_and_gradient(kind, student, teacher, mixture)
    gradient_NV = log_q_NV - student[:, -1:].clamp(min=LOWEST)
    gradient_NV.exp_().mul_(gradient_bins[:, -1:])
    return value_N, gradient_NV.scatter_(1, targets.ids_NK, gradient_bins[:, :-1])


def rows_of(targets: TopKTargets, rows: slice | torch.Tensor) -> TopKTargets:
    """Return some of the rows."""
    return TopKTargets(
        ids_NK=targets.ids_NK[rows],
        log_probabilities_NK=targets.log_probabilities_NK[rows],
        tail_log_probability_N=targets.tail_log_probability_N[rows],
        temperature=targets.temperature,
    )


def _log_tail(log_p_NV: torch.Tensor, ids_NK: torch.Tensor) -> torch.Tensor:
    """Sum what is left rather than subtract from one, which would leave rounding errors alone."""
    if ids_NK.shape[1] >= log_p_NV.shape[1]:
        return log_p_NV.new_full(log_p_NV.shape[:1], float("-inf"))
    return log_p_NV.scatter(1, ids_NK, float("-inf")).logsumexp(dim=-1)
