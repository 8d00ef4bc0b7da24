"""What both models' distributions tell about each other, at τ = 1, summed over rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .divergences import divergence_rows
from .objective import TopKTargets
from .top_k import top_k_divergence_rows

if TYPE_CHECKING:
    import torch


def add_to(sums: dict[str, torch.Tensor], name: str, values_N: torch.Tensor, weights_N: torch.Tensor) -> None:
    """Add Σ w · value to a running sum."""
    value = (values_N * weights_N).sum()
    sums[name] = sums[name] + value if name in sums else value


def add_dense(
    sums: dict[str, torch.Tensor],
    log_q_NV: torch.Tensor,
    log_p_NV: torch.Tensor,
    labels_N: torch.Tensor,
    weights_N: torch.Tensor,
) -> None:
    """Add KL, agreement, overlap and the teacher's cross-entropy, from log-probabilities over the same V tokens."""
    import torch

    add_to(sums, "forward_kl", divergence_rows("forward_kl", log_q_NV, log_p_NV, 0.5), weights_N)
    same_N = (log_q_NV.argmax(dim=-1) == log_p_NV.argmax(dim=-1)).float()
    add_to(sums, "agreement", same_N, weights_N)
    add_to(sums, "overlap", torch.minimum(log_q_NV, log_p_NV).exp_().sum(dim=-1), weights_N)
    # A padding column is no label of real text.
    known_N = labels_N.clamp(max=log_p_NV.shape[1] - 1)
    add_to(sums, "teacher_cross_entropy", -log_p_NV.gather(1, known_N[:, None]).squeeze(1), weights_N)


def add_top_k(
    sums: dict[str, torch.Tensor], log_q_NV: torch.Tensor, targets: TopKTargets, weights_N: torch.Tensor
) -> None:
    """Add agreement, and at τ = 1 the KL over K + 1 bins, from the student's log-probabilities at τ."""
    likeliest_N = targets.log_probabilities_NK.argmax(dim=-1, keepdim=True)
    same_N = (log_q_NV.argmax(dim=-1) == targets.ids_NK.gather(1, likeliest_N).squeeze(1)).float()
    add_to(sums, "agreement", same_N, weights_N)
    if targets.temperature == 1.0:
        add_to(sums, "forward_kl", top_k_divergence_rows("forward_kl", log_q_NV, targets, 0.5), weights_N)
