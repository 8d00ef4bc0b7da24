"""Static ranges of activations from calibration data: MinMax, percentile, L2 and KL divergence; no gradients anywhere.

A static activation range is one pair (low, high) for the tensor. A histogram is filled while calibration text runs
through the model, and the methods here look at it; what turns a range into a scale and a zero point is
compressed-tensors'.

Shapes: K candidate ranges, B occupied bins.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from ..ds_configs.quantization.scheme import ActivationQuantization
from .compressed_tensors import levels_of, range_scale_and_zero_point, values_of

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
        self.low = math.inf
        """Smallest value seen."""
        self.high = -math.inf
        """Largest value seen."""
        self.exponent: int | None = None
        """Power of two of the bins' width; `None` before a value other than zero was seen."""
        self._counts: Tensor | None = None

    @property
    def bin_width(self) -> float:
        """Width of one bin; 0 before a value other than zero was seen."""
        return 0.0 if self.exponent is None else math.ldexp(1.0, self.exponent)

    def add(self, values: Tensor) -> None:
        """Count every element of `values`, of any shape.

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
            if self._counts is None:
                self._counts = torch.zeros(self.bins, dtype=torch.int64, device=values.device)
            magnitude = max(-low, high, 0.0)
            if magnitude > 0.0:
                # Smallest exponent with magnitude < bins/2 · 2^exponent.
                needed = math.frexp(magnitude / (self.bins // 2))[1]
                self.exponent = needed if self.exponent is None else self.exponent
                for _ in range(needed - self.exponent):
                    # Bins of twice the width.
                    pairs = self._counts.view(-1, 2).sum(dim=1)
                    self._counts = torch.nn.functional.pad(pairs, [self.bins // 4] * 2)
                self.exponent = max(needed, self.exponent)
            exponent = self.exponent or 0
            # Scaling by a power of two is exact in fp32 except near its smallest numbers; fp64 covers those as well.
            wide = torch.float64 if exponent < -100 or flat.dtype == torch.float64 else torch.float32
            for part in flat.split(_VALUES_AT_ONCE):
                numbers = torch.floor(part.to(wide) * math.ldexp(1.0, -exponent)).to(torch.int64) + self.bins // 2
                self._counts += torch.bincount(numbers, minlength=self.bins).to(self._counts.device)

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


# Candidates times bins per step in fp64: 16 MB for each temporary.
_CELLS_AT_ONCE = 1 << 21
# Neighbouring candidates differ by 4 %; a finer search between them follows.
_STEPS_PER_OCTAVE = 16
# The largest finite number of `float8_e4m3fn`.
_LARGEST_FLOAT8 = 448.0


class ActivationRange(NamedTuple):
    """The values that codes cover; values outside are clipped."""

    low: float
    """Smallest value, at most 0."""
    high: float
    """Largest value, at least 0."""


def minmax_range(histogram: ActivationHistogram) -> ActivationRange:
    """Return the smallest and the largest value seen, with 0 between them."""
    histogram.occupied()
    return ActivationRange(min(histogram.low, 0.0), max(histogram.high, 0.0))


def percentile_range(histogram: ActivationHistogram, *, percentile: float, symmetric: bool) -> ActivationRange:
    """Return the range that leaves `100 - percentile` percent of the values outside.

    Symmetric: (-t, t) with `t` the percentile of |x|. Asymmetric: the same share is cut from either end. Inside a bin
    values count as spread evenly (as `numpy.percentile` with `method="linear"`, up to one bin).

    Raises:
        ValueError: the percentile is not in (0, 100].
    """
    import torch

    if not 0.0 < percentile <= 100.0:
        raise ValueError(f"percentile = {percentile} must be above 0 and at most 100")
    number_B, _, count_B = histogram.occupied()
    low, high = minmax_range(histogram)
    width, share = histogram.bin_width, percentile / 100
    if symmetric:
        folded_B = torch.where(number_B < 0, -1 - number_B, number_B)
        bound = min(_quantile(folded_B, count_B, share) * width, max(-low, high))
        return ActivationRange(-bound, bound)
    outside = (1 - share) / 2
    lower, upper = (_quantile(number_B, count_B, part) * width for part in (outside, 1 - outside))
    return ActivationRange(min(max(lower, low), 0.0), max(min(upper, high), 0.0))


def _quantile(number_B: Tensor, count_B: Tensor, share: float) -> float:
    """Return the place, in bins, below which `share` of the values lie."""
    import torch

    order = torch.argsort(number_B, stable=True)
    number_B, below_B = number_B[order], count_B[order].cumsum(0)
    wanted = share * float(below_B[-1])
    index = int(
        torch.searchsorted(below_B.double(), torch.tensor(wanted, dtype=torch.float64)).clamp(max=len(order) - 1)
    )
    before = float(below_B[index - 1]) if index else 0.0
    return float(number_B[index]) + (wanted - before) / float(below_B[index] - before)


def l2_range(histogram: ActivationHistogram, quantization: ActivationQuantization) -> ActivationRange:
    """Return the range with the smallest mean squared error `E[(x - Q(x))²]` after rounding and clipping.

    `Q` rounds as compressed-tensors 0.19.0 does (`quantization/utils/helpers.py` `calculate_qparams`); `x` are bin
    centres. The search is that of "min MSE" clipping (Banner et al., arXiv 1810.05723, eq. 3, here on data instead of a
    fitted distribution).
    """

    def error_K(low_K: Tensor, high_K: Tensor, centre_B: Tensor, weight_B: Tensor) -> Tensor:
        rounded_KB = rounded_values(centre_B, low_K, high_K, quantization)
        return ((rounded_KB - centre_B) ** 2 * weight_B).sum(dim=1)

    return _search(histogram, quantization, error_K)


def kl_range(histogram: ActivationHistogram, quantization: ActivationQuantization) -> ActivationRange:
    """Return the range whose codes keep most of the histogram's information: smallest `KL(P ‖ Q)`.

    After "8-bit Inference with TensorRT" (Migacz, GTC 2017, s7310, "Entropy Calibration"): `P` is the histogram with
    what lies outside of the range moved into the outermost bins inside; `Q` shares the counts of all bins inside that
    have one code evenly among the occupied ones, and ignores clipped values. There, only
    magnitudes and 128 levels occur; here bins are grouped by their code, whatever the bits, with or without zero point.
    Where `Q` is zero and `P` is not, `Q` counts as half a value.
    """

    import torch

    def divergence_K(low_K: Tensor, high_K: Tensor, centre_B: Tensor, weight_B: Tensor) -> Tensor:
        rounded_KB = rounded_values(centre_B, low_K, high_K, quantization)
        low_K, high_K = _covered(low_K, high_K, quantization)
        inside_KB = (centre_B >= low_K[:, None]) & (centre_B <= high_K[:, None])
        kept_KB = weight_B * inside_KB
        total_K = kept_KB.sum(dim=1).clamp(min=1.0)
        reference_KB = kept_KB.clone()
        position_B = torch.arange(len(centre_B))
        first_K = torch.where(inside_KB, position_B, len(centre_B)).amin(dim=1).clamp(max=len(centre_B) - 1)
        last_K = torch.where(inside_KB, position_B, -1).amax(dim=1).clamp(min=0)
        below_K = (weight_B * (centre_B < low_K[:, None])).sum(dim=1)
        above_K = (weight_B * (centre_B > high_K[:, None])).sum(dim=1)
        reference_KB.scatter_add_(1, first_K[:, None], below_K[:, None])
        reference_KB.scatter_add_(1, last_K[:, None], above_K[:, None])
        # Bins of one code are neighbours: their group is the running number of changes of the rounded value.
        changes_KB = (rounded_KB[:, 1:] != rounded_KB[:, :-1]).long().cumsum(dim=1)
        group_KB = torch.nn.functional.pad(changes_KB, (1, 0))
        mass_KB = torch.zeros_like(kept_KB).scatter_add_(1, group_KB, kept_KB)
        bins_KB = torch.zeros_like(kept_KB).scatter_add_(1, group_KB, inside_KB.double())
        spread_KB = (mass_KB / bins_KB.clamp(min=1.0)).gather(1, group_KB) * inside_KB
        expected_KB = spread_KB.clamp(min=0.5) / total_K[:, None]
        reference_KB = reference_KB / weight_B.sum()
        terms_KB = reference_KB * (reference_KB.clamp(min=1e-300) / expected_KB).log()
        return terms_KB.sum(dim=1)

    return _search(histogram, quantization, divergence_K)


def activation_range(histogram: ActivationHistogram, quantization: ActivationQuantization) -> ActivationRange:
    """Return the range by the method that `quantization` names."""
    if quantization.range_method == "minmax":
        return minmax_range(histogram)
    if quantization.range_method == "percentile":
        return percentile_range(histogram, percentile=quantization.percentile, symmetric=quantization.symmetric)
    return {"l2": l2_range, "kl": kl_range}[quantization.range_method](histogram, quantization)


def rounded_values(values_B: Tensor, low_K: Tensor, high_K: Tensor, quantization: ActivationQuantization) -> Tensor:
    """Return what each value becomes under each range, [K, B] in fp64; FP8 (E4M3) with `s = max(-low, high) / 448`."""
    import torch

    low_K1, high_K1 = low_K[:, None].double(), high_K[:, None].double()
    if quantization.number_type == "float":
        scale_K1 = torch.maximum(-low_K1, high_K1) / _LARGEST_FLOAT8
        scaled_KB = (values_B.double() / scale_K1).clamp(-_LARGEST_FLOAT8, _LARGEST_FLOAT8)
        return scaled_KB.float().to(torch.float8_e4m3fn).double() * scale_K1
    scales = range_scale_and_zero_point(
        low_K1, high_K1, bits=quantization.bits, symmetric=quantization.symmetric, stored_dtype=torch.float64
    )
    return values_of(levels_of(values_B.double(), *scales, quantization.bits), *scales)


def _covered(low_K: Tensor, high_K: Tensor, quantization: ActivationQuantization) -> tuple[Tensor, Tensor]:
    """Return the ranges that codes really cover: without symmetry, the zero point is rounded and moves both ends."""
    if quantization.symmetric or quantization.number_type == "float":
        return low_K, high_K
    largest = 2.0**quantization.bits - 1
    scale_K = (high_K - low_K) / largest
    below_K = (-low_K / scale_K).clamp(0, largest).round()
    return -below_K * scale_K, (largest - below_K) * scale_K


_Objective = Callable[[Any, Any, Any, Any], Any]


def _search(
    histogram: ActivationHistogram, quantization: ActivationQuantization, objective: _Objective
) -> ActivationRange:
    """Minimise over ranges: first in steps of a sixteenth of an octave, then around the best in steps of a bin."""
    import torch

    _, centre_B, count_B = histogram.occupied()
    whole = minmax_range(histogram)
    if histogram.bin_width == 0.0:
        return whole
    weight_B = count_B.double()
    levels = 256 if quantization.number_type == "float" else 2**quantization.bits
    # Below one bin for each code a histogram cannot tell ranges apart.
    narrowest = levels * histogram.bin_width / 2

    def best(lows: Tensor, highs: Tensor) -> ActivationRange:
        rows = max(1, _CELLS_AT_ONCE // len(centre_B))
        pairs = zip(lows.split(rows), highs.split(rows), strict=True)
        values_K = torch.cat([objective(low_K, high_K, centre_B, weight_B) for low_K, high_K in pairs])
        chosen = int(values_K.argmin())
        return ActivationRange(float(lows[chosen]), float(highs[chosen]))

    if quantization.symmetric or quantization.number_type == "float":
        bound = max(-whole.low, whole.high)
        coarse = _octaves(narrowest, bound)
        top = best(-coarse, coarse).high
        fine = _neighbours(top, narrowest, bound, histogram.bin_width)
        return best(-fine, fine)
    lows, highs = -_octaves(narrowest, -whole.low), _octaves(narrowest, whole.high)
    every_K2 = torch.cartesian_prod(lows[::8], highs[::8])
    chosen = best(every_K2[:, 0], every_K2[:, 1])
    for _ in range(3):
        before = chosen
        fine_high = torch.cat([highs, _neighbours(chosen.high, narrowest, whole.high, histogram.bin_width)])
        chosen = best(torch.full_like(fine_high, chosen.low), fine_high)
        fine_low = torch.cat([lows, -_neighbours(-chosen.low, narrowest, -whole.low, histogram.bin_width)])
        chosen = best(fine_low, torch.full_like(fine_low, chosen.high))
        if chosen == before:
            break
    low_1, high_1 = _covered(torch.tensor([chosen.low]).double(), torch.tensor([chosen.high]).double(), quantization)
    return ActivationRange(float(low_1), float(high_1))


def _octaves(narrowest: float, widest: float) -> Tensor:
    """Return candidates for one bound, from the widest down."""
    import torch

    if widest <= narrowest:
        return torch.tensor([max(widest, 0.0)], dtype=torch.float64)
    steps = math.ceil(_STEPS_PER_OCTAVE * math.log2(widest / narrowest))
    return widest * 2.0 ** (-torch.arange(steps, dtype=torch.float64) / _STEPS_PER_OCTAVE)


def _neighbours(bound: float, narrowest: float, widest: float, bin_width: float) -> Tensor:
    """Return bin edges around a bound, with the bound itself."""
    import torch

    ratio = 2.0 ** (1 / _STEPS_PER_OCTAVE)
    low, high = max(bound / ratio, min(narrowest, bound)), min(bound * ratio, widest)
    first, last = math.ceil(low / bin_width), math.floor(high / bin_width)
    stride = max(1, (last - first) // 128)
    edges = torch.arange(first, last + 1, stride, dtype=torch.float64) * bin_width
    return torch.cat([torch.tensor([bound], dtype=torch.float64), edges])
