"""Telemetry of student against teacher, row by row: divergence, agreement, entropies; at τ = 1."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .divergences import divergence_rows
from .objective import TopKTargets
from .top_k import top_k_divergence_rows

if TYPE_CHECKING:
    import torch


def weighted_rows(rows: dict[str, torch.Tensor], weights_N: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return w · value of each row by name, whose sums are told; rows that are not numbers count without weights."""
    return {
        name: values_N if name == "nonfinite_teacher_rows" else values_N * weights_N for name, values_N in rows.items()
    }


def summed(rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the sum of the rows by name."""
    return {name: values_N.sum() for name, values_N in rows.items()}


def dense_rows(
    log_q_NV: torch.Tensor,
    log_p_NV: torch.Tensor,
    *,
    forward_kl_N: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Return KL, agreement and overlap, from log-probabilities over the same V tokens.

    ``forward_kl_N`` is the KL where it is known already.
    """
    import torch

    if forward_kl_N is None:
        forward_kl_N = divergence_rows("forward_kl", log_q_NV, log_p_NV, 0.5)
    return {
        "forward_kl": forward_kl_N,
        "agreement": (log_q_NV.argmax(dim=-1) == log_p_NV.argmax(dim=-1)).float(),
        "overlap": torch.minimum(log_q_NV, log_p_NV).exp_().sum(dim=-1),
    }


def teacher_cross_entropy(log_p_NV: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    """Return the teacher's cross-entropy of each row, from log-probabilities over all of its own tokens.

    The student's is over all of its tokens, too, so that both are what `evaluate` measures. A label that is no token of
    the teacher counts 0.
    """
    import torch

    known_N = labels_N < log_p_NV.shape[1]
    taught_N = log_p_NV.gather(1, torch.where(known_N, labels_N, 0)[:, None]).squeeze(1)
    return torch.where(known_N, -taught_N, 0.0)


def top_k_rows(log_q_NV: torch.Tensor, targets: TopKTargets) -> dict[str, torch.Tensor]:
    """Return agreement, and at τ = 1 the KL over K + 1 bins, from the student's log-probabilities at τ."""
    likeliest_N = targets.log_probabilities_NK.argmax(dim=-1, keepdim=True)
    same_N = log_q_NV.argmax(dim=-1) == targets.ids_NK.gather(1, likeliest_N).squeeze(1)
    rows = {"agreement": same_N.float()}
    if targets.temperature == 1.0:
        rows["forward_kl"] = top_k_divergence_rows("forward_kl", log_q_NV, targets, 0.5)
    return rows
