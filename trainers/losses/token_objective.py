"""`TokenObjective`: what the token losses compute; free of torch, because settings name its values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Divergence = Literal["forward_kl", "reverse_kl", "jsd"]


@dataclass(frozen=True, kw_only=True)
class TokenObjective:
    """Loss of each row: ``(1 - α) · CE + α · τ² · D``, with the divergence D between distributions softened by τ."""

    alpha: float = 0.5
    """Weight of the divergence, 0 to 1; the cross-entropy with the labels has weight 1 - α."""
    temperature: float = 1.0
    """τ, which divides both models' logits inside the divergence; the cross-entropy uses τ = 1."""
    divergence: Divergence = "forward_kl"
    mixture: float = 0.5
    """JSD: the teacher's weight in the mixture M."""
    vocab_size: int | None = None
    """Real tokens V*, without padding: D compares the first V* columns only; `None`: the narrower of the two models."""
