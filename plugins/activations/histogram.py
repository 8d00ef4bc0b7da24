"""A histogram of activation values that grows with them, for the search of static ranges."""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# 64 KB a layer in int64, which ranks add up.
BINS = 8192
# `bincount` makes int64 copies of what it counts: 4 M values take 32 MB instead of eight times the activation.
_VALUES_AT_ONCE = 1 << 22


class ActivationHistogram:
    """Counts of activation values in a fixed number of bins, filled batch by batch.

    Bin k covers [k·w, (k+1)·w) with `w` a power of two, for k from -bins/2 to bins/2 - 1. A value beyond the last bin
    doubles `w` until it fits: neighbouring bins are added, so nothing is spread or lost. Because edges are multiples of
    a power of two, the counts do not depend on how the data were divided into batches, nor on their order. The largest
    magnitude uses more than half of its side, so at least bins/4 bins resolve it.
    """

    def __init__(self, *, bins: int = BINS) -> None:
        """Create an empty histogram of `bins` bins, a multiple of 4."""
        if bins <= 0 or bins % 4:
            raise ValueError(f"bins = {bins} must be a positive multiple of 4")
        self.bins = bins
        self.tokens = 0
        """Rows (vectors of one token) that were added."""
        self.low = math.inf
        """Smallest value seen."""
        self.high = -math.inf
        """Largest value seen."""
        self._exponent: int | None = None
        self._counts: Tensor | None = None

    @property
    def bin_width(self) -> float:
        """Width of one bin; 0 before a value other than zero was seen."""
        return 0.0 if self._exponent is None else math.ldexp(1.0, self._exponent)

    @property
    def count(self) -> int:
        """Values that were added."""
        return 0 if self._counts is None else int(self._counts.sum())

    def add(self, values: Tensor) -> None:
        """Count every element of `values`, whose last dimension holds the channels of one token.

        Raises:
            ValueError: a value is not finite.
        """
        import torch

        if values.numel() == 0:
            return
        with torch.no_grad():
            flat = values.detach().reshape(-1)
            low, high = (float(bound) for bound in torch.aminmax(flat))
            if not (math.isfinite(low) and math.isfinite(high)):
                raise ValueError(f"activations between {low} and {high}: a range needs finite values")
            self.low, self.high = min(self.low, low), max(self.high, high)
            self.tokens += values.numel() // (values.shape[-1] if values.dim() else 1)
            if self._counts is None:
                self._counts = torch.zeros(self.bins, dtype=torch.int64, device=values.device)
            self._grow(max(-low, high, 0.0))
            for part in flat.split(_VALUES_AT_ONCE):
                self._counts += torch.bincount(self._bins_of(part), minlength=self.bins).to(self._counts.device)

    def occupied(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return bin numbers k, centres, and counts of the bins that hold anything, on the CPU; fp64 centres, int64.

        Raises:
            ValueError: nothing was added.
        """
        import torch

        if self._counts is None:
            raise ValueError("no activations were observed: was the layer reached by the calibration data?")
        counts = self._counts.cpu()
        index_B = counts.nonzero().flatten()
        number_B = index_B - self.bins // 2
        centre_B = (number_B.to(torch.float64) + 0.5) * self.bin_width
        return number_B, centre_B.clamp(self.low, self.high), counts[index_B]

    @property
    def exponent(self) -> int | None:
        """Power of two of the bins' width; `None` before a value other than zero was seen."""
        return self._exponent

    def counts_at(self, exponent: int | None, device: Any) -> Tensor:
        """Return the counts [bins], int64, as bins of the width `2^exponent` hold them, which must not be narrower."""
        import torch

        counts = torch.zeros(self.bins, dtype=torch.int64, device=device)
        if self._counts is None:
            return counts
        counts += self._counts.to(device)
        # Bins narrower than any value but zero hold zeros alone, which stay in the middle whatever the width.
        if self._exponent is not None:
            assert exponent is not None and exponent >= self._exponent, "bins only ever grow"
            for _ in range(exponent - self._exponent):
                counts = _merged_pairs(counts)
        return counts

    def add_counts(self, counts: Tensor, *, exponent: int | None, low: float, high: float, tokens: int) -> None:
        """Add what others counted, in bins of the width `2^exponent`.

        Args:
            counts: int64 [bins].
            exponent: Of their width; `None` if they saw zeros alone.
            low: Smallest value that they saw; infinity if none.
            high: Largest value; minus infinity if none.
            tokens: Rows that they saw.
        """
        if not math.isfinite(low):
            return
        if self._counts is None:
            self._exponent, self._counts = exponent, counts.clone()
        else:
            wider = max((each for each in (self._exponent, exponent) if each is not None), default=None)
            own = self.counts_at(wider, counts.device)
            others = ActivationHistogram(bins=self.bins)
            others._exponent, others._counts = exponent, counts
            self._exponent, self._counts = wider, own + others.counts_at(wider, counts.device)
        self.low, self.high, self.tokens = min(self.low, low), max(self.high, high), self.tokens + tokens

    def record(self) -> dict[str, Any]:
        """Return everything as JSON holds it; counts are int64, compressed, as text."""
        import torch

        counts = torch.zeros(0, dtype=torch.int64) if self._counts is None else self._counts.cpu()
        return {
            "bins": self.bins,
            "exponent": self._exponent,
            "low": self.low if counts.numel() else None,
            "high": self.high if counts.numel() else None,
            "tokens": self.tokens,
            "counts": base64.b64encode(zlib.compress(counts.numpy().astype("<i8").tobytes())).decode("ascii"),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> ActivationHistogram:
        """Return the histogram that a record holds."""
        import numpy
        import torch

        histogram = cls(bins=record["bins"])
        packed = zlib.decompressobj().decompress(base64.b64decode(record["counts"]), histogram.bins * 8)
        counts = torch.from_numpy(numpy.frombuffer(packed, dtype="<i8").astype("int64"))
        if counts.numel() == histogram.bins:
            histogram.add_counts(
                counts,
                exponent=record["exponent"],
                low=record["low"],
                high=record["high"],
                tokens=record["tokens"],
            )
        return histogram

    def _bins_of(self, values: Tensor) -> Tensor:
        import torch

        exponent = 0 if self._exponent is None else self._exponent
        # Scaling by a power of two is exact in fp32 except near its smallest numbers; fp64 covers those as well.
        wide = values.to(torch.float64 if exponent < -100 or values.dtype == torch.float64 else torch.float32)
        numbers = torch.floor(wide * math.ldexp(1.0, -exponent)).to(torch.int64)
        return numbers + self.bins // 2

    def _grow(self, magnitude: float) -> None:
        if magnitude == 0.0:
            return
        # Smallest exponent with magnitude < bins/2 · 2^exponent.
        needed = math.frexp(magnitude / (self.bins // 2))[1]
        if self._exponent is None:
            self._exponent = needed
        while self._exponent < needed:
            self._halve_resolution()

    def _halve_resolution(self) -> None:
        assert self._counts is not None
        assert self._exponent is not None
        self._counts = _merged_pairs(self._counts)
        self._exponent += 1


def _merged_pairs(counts: Tensor) -> Tensor:
    """Return the counts in bins of twice the width."""
    import torch

    merged = torch.zeros_like(counts)
    quarter = len(counts) // 4
    merged[quarter : len(counts) - quarter] = counts.view(-1, 2).sum(dim=1)
    return merged
