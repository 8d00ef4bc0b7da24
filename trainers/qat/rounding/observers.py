"""Observers of activations: they see a layer's inputs batch by batch, agree over ranks, and give a range.

What a step saw is kept apart until the step ends. Then all ranks agree on it, and only then does the range move: every
forward pass of a step rounds alike, also one that gradient checkpointing repeats, and neither micro-batches nor ranks
nor their order change the result.

    minmax               low = least of all steps                             high likewise
    moving_average       low ← low + 0.01 · (least of the step - low)         from the first step on
    percentile, l2, kl   searched on a histogram of all steps                 `plugins/activations/ranges.py`

The constant is the default of `MovingAverageMinMaxObserver` in torch.ao (torch 2.13), which averages batches; here a
batch is all that a step saw. Searching takes tens of milliseconds a layer, so histograms are searched after steps 1, 2,
4, 8 and so on of those that were observed; in between the range stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from ....ds_configs.quantization.scheme import ActivationQuantization, RangeMethod
from ....plugins.activations.histogram import ActivationHistogram
from ....plugins.activations.ranges import activation_range

if TYPE_CHECKING:
    from torch import Tensor

ObserverMethod = Literal["minmax", "moving_average", "percentile", "l2", "kl"]
METHODS: tuple[ObserverMethod, ...] = get_args(ObserverMethod)
AVERAGING_CONSTANT = 0.01
"""Share of the newest step in a moving average."""
Reduction = Callable[["Tensor", Literal["min", "sum"]], "Tensor"]
"""Takes a tensor of this rank to the elementwise least, or to the sum, over all ranks."""
# One all-reduce of 256 histograms of 8192 int64 counts takes 17 MB; one for each layer would cost its latency.
_HISTOGRAMS_AT_ONCE = 256


class BoundsObserver:
    """Least and largest value, over all steps or as a moving average of steps.

    Both ends are kept as one tensor (low, -high), fp32 [2], for which both are a least value.
    """

    def __init__(self, *, averaging_constant: float | None = None) -> None:
        """Create an observer; without a constant it covers everything it sees."""
        self.averaging_constant = averaging_constant
        self.ends: Tensor | None = None
        """Of closed steps; `None` before one with values."""
        self._pending: Tensor | None = None
        self._refused: Tensor | None = None

    @property
    def refused(self) -> int:
        """Batches that this rank left out because they held infinities or NaN."""
        return 0 if self._refused is None else int(self._refused)

    def start_from(self, low: Tensor, high: Tensor) -> None:
        """Go on from a range that is known, fp32 [1] each."""
        import torch

        self.ends = torch.cat([low, -high])

    def add(self, values: Tensor) -> None:
        """See the inputs of one forward pass; nothing waits for the accelerator."""
        import torch

        if values.numel() == 0:
            return
        low, high = torch.aminmax(values.detach())
        found = torch.stack([low, -high]).float()
        # Gradient scaling of fp16 meets infinities and skips the step: such a batch says nothing about ranges.
        finite = torch.isfinite(found).all()
        found = torch.where(finite, found, torch.full_like(found, math.inf))
        refused = (~finite).long()
        self._pending = found if self._pending is None else torch.minimum(self._pending, found)
        self._refused = refused if self._refused is None else self._refused + refused

    def pending(self) -> Tensor:
        """Return both ends of the open step; infinity if it has seen nothing."""
        import torch

        return torch.full((2,), math.inf) if self._pending is None else self._pending

    def absorb(self, ends: Tensor) -> None:
        """Close a step in which some rank saw values, with the ends that it leads to."""
        self._pending, self.ends = None, ends

    def range(self) -> tuple[Tensor, Tensor] | None:
        """Return low and high, fp32 [1] each; `None` before a step with values was closed."""
        return None if self.ends is None else (self.ends[0:1], -self.ends[1:2])

    def local_range(self) -> tuple[Tensor, Tensor] | None:
        """Return the open step's range on this rank, where no step was closed before."""
        if self.ends is not None or self._pending is None:
            return self.range()
        return self._pending[0:1], -self._pending[1:2]

    def record(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {"seen": None if self.ends is None else self.ends.tolist()}

    def take_up(self, record: Mapping[str, Any]) -> None:
        """Go on from a record."""
        import torch

        if record.get("seen") is not None:
            self.ends = torch.tensor(record["seen"], dtype=torch.float32)


class HistogramObserver:
    """A histogram of all values, on which the range is searched; reading it waits for the accelerator."""

    def __init__(self, quantization: ActivationQuantization, method: RangeMethod) -> None:
        """Create an empty observer."""
        self.quantization = replace(quantization, range_method=method)
        self.refused = 0
        """Batches that this rank left out because they held infinities or NaN."""
        self.histogram = ActivationHistogram()
        """Closed steps of all ranks."""
        self.open = ActivationHistogram()
        """The open step of this rank."""
        self.steps = 0
        """Steps that were closed."""
        self._range: tuple[Tensor, Tensor] | None = None

    def start_from(self, low: Tensor, high: Tensor) -> None:
        """Use a range that is known until the histogram is searched."""
        self._range = (low, high)

    def add(self, values: Tensor) -> None:
        """See the inputs of one forward pass."""
        try:
            self.open.add(values.detach())
        except ValueError:
            self.refused += 1

    def pending(self) -> Tensor:
        """Return the least value of the open step, minus the largest, and minus the bins' exponent, fp32 [3]."""
        import torch

        exponent = math.inf if self.open.exponent is None else -self.open.exponent
        return torch.tensor([self.open.low, -self.open.high, exponent], dtype=torch.float32)

    def pending_counts(self, seen: Tensor) -> Tensor:
        """Return the open step's counts in bins that fit all ranks', and its tokens, int64 [bins + 1]."""
        import torch

        counts = self.open.counts_at(_exponent(seen), seen.device)
        return torch.cat([counts, counts.new_tensor([self.open.tokens])])

    def absorb(self, seen: Tensor, counts: Tensor) -> None:
        """Close the step with what all ranks saw: [3] and [bins + 1]."""
        low, high = float(seen[0]), -float(seen[1])
        self.histogram.add_counts(counts[:-1], exponent=_exponent(seen), low=low, high=high, tokens=int(counts[-1]))
        self.open = ActivationHistogram()
        self.steps += 1
        if self.histogram.tokens and self.steps & (self.steps - 1) == 0:
            self.search()

    def search(self) -> None:
        """Find the range anew."""
        self._range = self._found(self.histogram)

    def range(self) -> tuple[Tensor, Tensor] | None:
        """Return low and high, fp32 [1] each; `None` before a step with values was closed."""
        return self._range

    def local_range(self) -> tuple[Tensor, Tensor] | None:
        """Return what the range would be if the first step ended now and this rank were alone."""
        return self._found(self.open) if self._range is None and self.open.tokens else self._range

    def record(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {"steps": self.steps, "histogram": self.histogram.record()}

    def take_up(self, record: Mapping[str, Any]) -> None:
        """Go on from a record."""
        if "histogram" not in record:
            return
        self.steps = record["steps"]
        self.histogram = ActivationHistogram.from_record(record["histogram"])

    def _found(self, histogram: ActivationHistogram) -> tuple[Tensor, Tensor]:
        import torch

        found = activation_range(histogram, self.quantization)
        return torch.tensor([found.low]), torch.tensor([found.high])


RangeObserver = BoundsObserver | HistogramObserver


def observer_of(quantization: ActivationQuantization, method: ObserverMethod) -> RangeObserver:
    """Return an observer that has seen nothing."""
    if method == "minmax":
        return BoundsObserver()
    if method == "moving_average":
        return BoundsObserver(averaging_constant=AVERAGING_CONSTANT)
    return HistogramObserver(quantization, cast(RangeMethod, method))


def close_step(observers: Sequence[RangeObserver], reduction: Reduction) -> None:
    """Let observers of all ranks agree on what a step saw; two collectives, whatever the number of layers.

    Args:
        observers: Of the same layers in the same order on every rank.
        reduction: Over ranks.
    """
    import torch

    if not observers:
        return
    padded = [torch.nn.functional.pad(one.pending(), (0, 3 - len(one.pending())), value=math.inf) for one in observers]
    device = next((row.device for row in padded if row.device.type != "cpu"), padded[0].device)
    seen_N3 = reduction(torch.stack([row.to(device) for row in padded]), "min").to(device)
    known = torch.isfinite(seen_N3[:, 0]).tolist()
    _close_bounds(
        [
            (observer, seen_3[:2])
            for observer, seen_3, any_values in zip(observers, seen_N3.unbind(), known, strict=True)
            if isinstance(observer, BoundsObserver) and any_values
        ]
    )
    seen_on_host = seen_N3.cpu().unbind()
    counting = [
        (observer, seen_3)
        for observer, seen_3 in zip(observers, seen_on_host, strict=True)
        if isinstance(observer, HistogramObserver)
    ]
    for first in range(0, len(counting), _HISTOGRAMS_AT_ONCE):
        part = counting[first : first + _HISTOGRAMS_AT_ONCE]
        counts = reduction(torch.stack([observer.pending_counts(seen) for observer, seen in part]).to(device), "sum")
        for (observer, seen), row in zip(part, counts.cpu(), strict=True):
            observer.absorb(seen, row)


def _close_bounds(seen: Sequence[tuple[BoundsObserver, Tensor]]) -> None:
    """Move ranges by what a step saw, all layers of one kind together: each alone would be a dozen tiny kernels."""
    import torch

    kinds: dict[tuple[float | None, bool], list[tuple[BoundsObserver, Tensor]]] = {}
    for observer, ends in seen:
        kinds.setdefault((observer.averaging_constant, observer.ends is None), []).append((observer, ends))
    for (share, is_first), part in kinds.items():
        new_N2 = torch.stack([ends for _, ends in part])
        if not is_first:
            old_N2 = torch.stack([observer.ends.to(new_N2.device) for observer, _ in part if observer.ends is not None])
            new_N2 = torch.minimum(old_N2, new_N2) if share is None else old_N2 + share * (new_N2 - old_N2)
        for (observer, _), ends in zip(part, new_N2.unbind(), strict=True):
            observer.absorb(ends)


def _exponent(seen: Tensor) -> int | None:
    found = float(seen[2])
    return None if math.isinf(found) else int(-found)
