"""Divergences between two distributions over tokens, row by row, with their gradients.

p is the teacher, q the student, both as fp32 log-probabilities [N, V]. `mixture` is the teacher's weight β in the
JSD's M = β p + (1 - β) q, and the share λ of the first distribution in the skewed divergences' mixtures.

    forward_kl          KL(p | q)                            Hinton et al., arXiv 1503.02531
    reverse_kl          KL(q | p)                            MiniLLM, arXiv 2306.08543
    jsd                 β KL(p | M) + (1 - β) KL(q | M)      GKD, arXiv 2306.13649
    skewed_kl           KL(p | λ p + (1 - λ) q)              DistiLLM, arXiv 2402.03898
    skewed_reverse_kl   KL(q | (1 - λ) p + λ q)              DistiLLM, arXiv 2402.03898
    total_variation     ½ Σ |p - q|

The JSD divided by β goes over into the forward KL as β goes to 0, the JSD itself into 0.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .objective import Divergence

if TYPE_CHECKING:
    import torch

_MIXED = ("jsd", "skewed_kl", "skewed_reverse_kl")
LOWEST = -1e4
"""Stands for log 0: its exponential is 0 in fp32, and differences of it are finite."""
_VANISHING = -80.0
"""Below this log-probability, p (log p - log q) - p + q is q to fp32's precision."""


def divergence_rows(
    kind: Divergence,
    student_log_probabilities_NV: torch.Tensor,
    teacher_log_probabilities_NV: torch.Tensor,
    mixture: float,
) -> torch.Tensor:
    """Return the divergence of each row, [N], differentiable by autograd."""
    log_q = student_log_probabilities_NV.clamp(min=LOWEST)
    log_p = teacher_log_probabilities_NV.clamp(min=LOWEST)
    log_m = _log_mixture(kind, log_q, log_p, mixture) if kind in _MIXED else None
    return _rows(kind, log_q, log_p, log_m, mixture)


def divergence_and_gradient(
    kind: Divergence,
    student_log_probabilities_NV: torch.Tensor,
    teacher_log_probabilities_NV: torch.Tensor,
    mixture: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the divergence [N] and its gradient with respect to the student's logits [N, V], without autograd.

    With g = ∂D/∂q at fixed p, the gradient is ``q (g - Σ q g)``; constants in g cancel.
    """
    log_q = student_log_probabilities_NV.clamp(min=LOWEST)
    log_p = teacher_log_probabilities_NV.clamp(min=LOWEST)
    log_m = _log_mixture(kind, log_q, log_p, mixture) if kind in _MIXED else None
    value_N = _rows(kind, log_q, log_p, log_m, mixture)
    q = log_q.exp()
    if kind == "forward_kl":
        return value_N, q.sub_(log_p.exp_())
    if log_m is not None:
        slope = _mixed_slope(kind, log_q, log_p, log_m, mixture)
    elif kind == "reverse_kl":
        slope = log_q.sub_(log_p)
    else:
        slope = log_p.exp_().neg_().add_(q).sign_().mul_(0.5)
    slope.sub_((q * slope).sum(dim=-1, keepdim=True))
    return value_N, q.mul_(slope)


def _rows(
    kind: Divergence, log_q: torch.Tensor, log_p: torch.Tensor, log_m: torch.Tensor | None, mixture: float
) -> torch.Tensor:
    if kind == "total_variation":
        return 0.5 * (log_p.exp() - log_q.exp()).abs().sum(dim=-1)
    if log_m is None:
        first, second = (log_p, log_q) if kind == "forward_kl" else (log_q, log_p)
        return _relative_entropy(first, second).sum(dim=-1)
    if kind == "jsd":
        from_teacher, from_student = _relative_entropy(log_p, log_m), _relative_entropy(log_q, log_m)
        return (mixture * from_teacher + (1.0 - mixture) * from_student).sum(dim=-1)
    return _relative_entropy(log_p if kind == "skewed_kl" else log_q, log_m).sum(dim=-1)


def _mixed_slope(
    kind: Divergence, log_q: torch.Tensor, log_p: torch.Tensor, log_m: torch.Tensor, mixture: float
) -> torch.Tensor:
    """Return ∂D/∂q at fixed p, up to a constant; overwrites what it is given."""
    if kind == "jsd":
        return log_q.sub_(log_m).mul_(1.0 - mixture)
    if kind == "skewed_kl":
        return log_p.sub_(log_m).exp_().mul_(mixture - 1.0)
    ratio = log_q.sub_(log_m)
    return ratio.sub(ratio.exp(), alpha=mixture)


def _relative_entropy(log_a: torch.Tensor, log_b: torch.Tensor) -> torch.Tensor:
    """Return ``a (log a - log b) - a + b`` elementwise, whose sum over normalised rows is KL(a | b).

    Each element is 0 or more, so that no rounding makes a sum negative, and an error in a row's normalisation enters
    in second order only, where it would enter ``a (log a - log b)`` in first.
    """
    import torch

    counts = log_a > _VANISHING
    difference = torch.where(counts, log_a - log_b, torch.zeros_like(log_a))
    inside = log_a.exp() * (torch.expm1(-difference) + difference)
    return torch.where(counts, inside, log_b.exp()).clamp(min=0.0)


def _log_mixture(kind: Divergence, log_q: torch.Tensor, log_p: torch.Tensor, mixture: float) -> torch.Tensor:
    import torch

    teacher_share = 1.0 - mixture if kind == "skewed_reverse_kl" else mixture
    return torch.logaddexp(log_p + _log(teacher_share), log_q + _log(1.0 - teacher_share))


def _log(share: float) -> float:
    return math.log(share) if share > 0 else 2 * LOWEST
