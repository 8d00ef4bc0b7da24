"""Masks of sparse weights: exactly the share that is asked for, the smallest first, alike on every rank and device.

A weight that is zero already is the smallest there is, so that zeros stay zeros as the share grows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal

from ..formats.bit_packing import pack_bits

if TYPE_CHECKING:
    from torch import Tensor

Pattern = Literal["unstructured", "2:4"]
_DIGITS = ((20, 11), (10, 10), (0, 10))
"""Shift and number of bits of the three digits of a magnitude's 31 bits."""


def magnitudes(weight: Tensor, pattern: Pattern = "unstructured") -> Tensor:
    """Return |w| of a matrix [O, I], flattened, as int32 that sort as the fp32 magnitudes do.

    With ``2:4`` the two largest of each four neighbours in a row become -1: they are never chosen. Of equal ones the
    first are the smaller.
    """
    import torch

    bits = weight.float().abs().contiguous().view(torch.int32)
    if pattern == "2:4":
        bits_G4 = bits.reshape(-1, 4)
        order_G4 = bits_G4.argsort(dim=-1, stable=True)
        bits = bits_G4.scatter(-1, order_G4[:, 2:], -1)
    return bits.reshape(-1)


def smallest(
    numbers: Callable[[], Iterable[Tensor]], count: int, *, add_up: Callable[[Tensor], Tensor] = lambda counts: counts
) -> tuple[int, int]:
    """Return the number that `count` smallest numbers end at, and how many of those equal to it belong to them.

    Radix selection: three counts of one digit each, whatever the amount of numbers.

    Args:
        numbers: Gives the same int32 vectors at each call, one after the other; negative ones do not count.
        count: How many; 0 gives a number below all.
        add_up: Adds counts up over ranks that hold other vectors.
    """
    import torch

    if count < 1:
        return -1, 0
    prefix, left = 0, count
    for shift, digits in _DIGITS:
        counted = torch.zeros(1 << digits, dtype=torch.int64)
        for vector in numbers():
            fits = vector[(vector >= 0) & ((vector >> (shift + digits)) == prefix)]
            found = torch.bincount((fits >> shift) & ((1 << digits) - 1), minlength=1 << digits)
            counted += found.cpu()
        up_to = add_up(counted).cumsum(0)
        digit = int((up_to < left).sum())
        left -= int(up_to[digit - 1]) if digit else 0
        prefix = (prefix << digits) | digit
    return prefix, left


def chosen(numbers: Tensor, last: int, equal: int) -> Tensor:
    """Return the mask of numbers up to `last`, of those equal to it the first `equal`.

    Args:
        numbers: int32 [N], as `magnitudes` gives them.
        last: From `smallest`.
        equal: From `smallest`, less those in earlier vectors.
    """
    import torch

    same = numbers == last
    taken = same if int(same.sum()) <= equal else same & (same.cumsum(0, dtype=torch.int32) <= equal)
    return ((numbers >= 0) & (numbers < last)) | taken


def packed_mask(mask: Tensor) -> Tensor:
    """Return a mask as bits, uint8, lowest bit first."""
    return pack_bits(mask, 1)


def set_to_zero(flat: Tensor, packed: Tensor) -> None:
    """Set what a packed mask of the same length marks to zero, in place."""
    flat.masked_fill_(unpacked_mask(packed, flat.numel()), 0)


def unpacked_mask(packed: Tensor, length: int) -> Tensor:
    """Return a mask from its bits."""
    import torch

    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(1) >> places) & 1).bool().reshape(-1)[:length]
