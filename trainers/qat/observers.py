"""Observers of activations: they see a layer's inputs batch by batch, agree over ranks, and give a range.

What a step saw is kept apart until the step ends. Then all ranks agree on it, and only then does the range move: every
forward pass of a step rounds alike, also one that gradient checkpointing repeats, and neither micro-batches nor ranks
nor their order change the result.

    minmax           low = min over all steps                                 high likewise
    moving_average   low ← low + 0.01 · (least of the step - low)             the first step as it is
    percentile, l2, kl   searched on a histogram of all steps                 `plugins/activation_ranges.py`

The constant is that of `MovingAverageMinMaxObserver` of torch.ao 2.13, which averages batches; here a step is one batch,
over all its micro-batches and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, Protocol, get_args

from ...ds_configs.quantization.scheme import ActivationQuantization
from ...plugins.activation_histogram import ActivationHistogram
from ...plugins.activation_ranges import activation_range

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ObserverMethod = Literal["minmax", "moving_average", "percentile", "l2", "kl"]
METHODS: tuple[ObserverMethod, ...] = get_args(ObserverMethod)
AVERAGING_CONSTANT = 0.01
"""Share of the newest step in a moving average."""
Reduce = Callable[["Tensor", Literal["min", "sum"]], "Tensor"]
"""Takes a tensor of this rank to the elementwise least or sum over all ranks."""
_HISTOGRAMS_AT_ONCE = 512


class RangeObserver(Protocol):
    """What every observer does."""

    refused: int
    """Batches that were left out because they held infinities or NaN."""

    def add(self, values: Tensor) -> None:
        """See the inputs of one forward pass."""

    def pending(self) -> Tensor:
        """Return least value, minus the largest, and minus the bins' exponent of this step, fp32 [3]; infinity if none.

        The least over all ranks of each is what all ranks saw.
        """

    def bounds(self, *, local: bool = False) -> tuple[Tensor, Tensor] | None:
        """Return low and high, fp32 [1] each; `None` before anything was seen. `local`: of this rank's open step."""


class BoundsObserver:
    """Least and largest value, over all steps or as a moving average of steps."""

    def __init__(self, *, averaging_constant: float | None = None, start: tuple[Tensor, Tensor] | None = None) -> None:
        """Create an observer; without a constant it covers everything, `start` is a range to go on from."""
        self.averaging_constant = averaging_constant
        self.refused = 0
        self._bounds = start
        self._pending: Tensor | None = None

    def add(self, values: Tensor) -> None:
        """See the inputs of one forward pass; nothing waits for the accelerator."""
        import torch

        if values.numel() == 0:
            return
        low, high = torch.aminmax(values.detach())
        found = torch.stack([low, -high]).float()
        # Gradient scaling of fp16 meets infinities and skips the step: such a batch says nothing about ranges.
        found = torch.where(torch.isfinite(found).all(), found, torch.full_like(found, math.inf))
        self._pending = found if self._pending is None else torch.minimum(self._pending, found)

    def pending(self) -> Tensor:
        """Return what the step saw, as `RangeObserver` says."""
        import torch

        found = torch.full((2,), math.inf) if self._pending is None else self._pending
        return torch.cat([found, found.new_full((1,), math.inf)])

    def absorb(self, seen: Tensor) -> None:
        """Close the step with what all ranks saw [3]."""
        self._pending = None
        if not math.isfinite(float(seen[0])):
            self.refused += 1
            return
        self._bounds = self._moved(seen)

    def bounds(self, *, local: bool = False) -> tuple[Tensor, Tensor] | None:
        """Return low and high, as `RangeObserver` says."""
        if local and self._pending is not None:
            return self._moved(self.pending())
        return self._bounds

    def _moved(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        import torch

        low, high = seen[0:1], -seen[1:2]
        if self._bounds is None:
            return low, high
        old_low, old_high = (each.to(seen.device) for each in self._bounds)
        if self.averaging_constant is None:
            return torch.minimum(old_low, low), torch.maximum(old_high, high)
        share = self.averaging_constant
        return old_low + share * (low - old_low), old_high + share * (high - old_high)
