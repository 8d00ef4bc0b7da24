"""Inputs and results of the token losses: the objective, the teacher's side of it, and the sums of a batch.

Shapes: N rows (one for each predicted token), H hidden width, V vocabulary, K kept tokens of a cached teacher.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ...plugins.transformers.output_heads import OutputHead

if TYPE_CHECKING:
    import torch

Divergence = Literal["forward_kl", "reverse_kl", "jsd", "skewed_kl", "skewed_reverse_kl", "total_variation"]


@dataclass(frozen=True, kw_only=True)
class TokenObjective:
    """Each row's loss ``(1 - α) · CE + α · τ² · D``, the divergence D between distributions softened by τ."""

    alpha: float = 0.5
    """Weight of the divergence, 0 to 1; 1 - α is that of the cross-entropy with the labels."""
    temperature: float = 1.0
    """τ, which divides both models' logits inside the divergence; the cross-entropy uses τ = 1."""
    divergence: Divergence = "forward_kl"
    """Which divergence."""
    mixture: float = 0.5
    """JSD: the teacher's weight in the mixture M. Skewed: λ, the share of the first distribution in the mixture."""
    vocab_size: int | None = None
    """Real tokens V*, without padding: D compares the first V* columns only; `None`: the narrower of the two models."""


@dataclass(frozen=True, kw_only=True)
class LogitTargets:
    """A teacher that gives its logits."""

    logits_NV: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class HiddenTargets:
    """A teacher that gives the input of its output head, so that its logits exist for one chunk at a time only."""

    hidden_NH: torch.Tensor
    head: OutputHead


@dataclass(frozen=True, kw_only=True)
class TopKTargets:
    """A teacher that gives its K likeliest tokens, at the temperature of the objective, and the mass of all others."""

    ids_NK: torch.Tensor
    """int64 token ids, distinct within a row."""
    log_probabilities_NK: torch.Tensor
    """fp32 log-probabilities of these tokens at τ."""
    tail_log_probability_N: torch.Tensor
    """fp32 log of the mass of all other tokens at τ; -inf where there is none."""
    temperature: float
    """The τ that these probabilities belong to."""


TeacherTargets = LogitTargets | HiddenTargets | TopKTargets


@dataclass(frozen=True, kw_only=True)
class TokenSums:
    """Sums over the valid rows of a batch, fp32 scalars; only `loss` carries a gradient.

    Divide by the global sum of weights to get means. `None` stands for what the teacher's targets cannot tell.
    """

    loss: torch.Tensor
    """Σ w · ((1 - α) CE + α τ² D)."""
    weight: torch.Tensor
    """Σ w over valid rows; the number of valid rows without weights."""
    divergence: torch.Tensor | None = None
    """Σ w · D at the objective's temperature, without τ²."""
    forward_kl: torch.Tensor | None = None
    """Σ w · KL(teacher | student) at τ = 1."""
    agreement: torch.Tensor | None = None
    """Σ w · [both models' likeliest tokens are the same]."""
    overlap: torch.Tensor | None = None
    """Σ w · Σ_v min(p_v, q_v) at τ = 1: the expected acceptance of speculative decoding."""
    student_cross_entropy: torch.Tensor | None = None
    """Σ w · CE of the student with the labels."""
    teacher_cross_entropy: torch.Tensor | None = None
    """Σ w · CE of the teacher with the labels; `None` for top-k targets."""
    nonfinite_teacher_rows: torch.Tensor | None = None
    """Number of rows whose teacher logits hold NaN or infinity; the caller refuses to train on them."""
    rows: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """[N] shares of the valid rows in the sums from `divergence` on, by name, detached."""
