"""Lines by which the first rank of a launch tells the process that launched it how far it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

PROGRESS = "shardwright-progress: "
"""Begins a line of rank 0 that tells how far it is, as JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Figures of a running training, as its first rank tells them; `None` for what is not known yet."""

    loss: float | None = None
    """Logged last."""
    tokens_per_second: float | None = None
    """Of all ranks, since the second step."""
    peak_allocated_gb: float | None = None
    """Tensors on the fullest accelerator, at most."""
    slowest_rank: int | None = None
    """Rank that takes longest for what it does alone: loading samples, and the first forward pass of a step."""
    slowest_rank_ratio: float | None = None
    """How many times the median rank's."""

    @classmethod
    def told(cls, line: Mapping[str, Any]) -> Figures:
        """Return what a line of progress states."""
        known = {name: float(line[name]) for name in cls.__dataclass_fields__ if line.get(name) is not None}
        if "slowest_rank" in known:
            known["slowest_rank"] = int(known["slowest_rank"])
        return cls(**known)  # type: ignore[arg-type]

    def __str__(self) -> str:
        """Return loss and speed, as a line shows them.

        >>> str(Figures(loss=2.3126, tokens_per_second=1204.4))
        'loss 2.313, 1,204 tokens/s'
        """
        loss = "" if self.loss is None else f"loss {self.loss:.3f}"
        speed = "" if self.tokens_per_second is None else f"{self.tokens_per_second:,.0f} tokens/s"
        return ", ".join(figure for figure in (loss, speed) if figure)


OnFigures = Callable[[Figures], None]
"""Receives the figures of a running training."""
OnStep = Callable[[int, int, Figures], None]
"""Receives an optimizer step by its number, the number of all, and what is known of it."""
