"""Codes of a few bits as bytes, and sparse matrices as three arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...ds_configs.specs.errors import Fault, RefusedInputError

if TYPE_CHECKING:
    import torch

# A code takes a byte for each of its bits while it is packed; a multiple of 8, so that parts end on whole bytes.
_CODES_AT_ONCE = 1 << 20


def packed_size(count: int, bits: int) -> int:
    """Return the bytes that codes take."""
    return (count * bits + 7) // 8


def pack_bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return codes 0 to 2^bits - 1 as one stream of bits, uint8: code i starts at bit `i·bits`, lowest bit first.

    >>> pack_bits(torch.tensor([1, 2, 3]), 3).tolist()
    [209, 0]
    """
    import torch

    flat_N = codes.reshape(-1).to(torch.uint8)
    count = flat_N.numel()
    packed = [_pack(flat_N[start : start + _CODES_AT_ONCE], bits) for start in range(0, count, _CODES_AT_ONCE)]
    return torch.cat(packed)[: packed_size(count, bits)] if packed else flat_N


def unpack_bits(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Return the first `count` codes of a stream of bits as uint8."""
    import torch

    step = packed_size(_CODES_AT_ONCE, bits)
    parts = [_unpack(packed[start : start + step], bits) for start in range(0, packed.numel(), step)]
    return torch.cat(parts)[:count] if parts else packed


def _pack(codes_N: torch.Tensor, bits: int) -> torch.Tensor:
    import torch

    filled = torch.nn.functional.pad(codes_N, (0, -codes_N.numel() % 8)).unsqueeze(1)
    digits = (filled >> torch.arange(bits, dtype=torch.uint8, device=filled.device)) & 1
    places = torch.arange(8, dtype=torch.uint8, device=filled.device)
    return (digits.reshape(-1, 8) << places).sum(dim=1, dtype=torch.uint8)


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    import torch

    digits = (packed.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1
    digits = digits.reshape(-1)
    digits = digits[: digits.numel() // bits * bits].reshape(-1, bits)
    return (digits << torch.arange(bits, dtype=torch.uint8, device=packed.device)).sum(dim=1, dtype=torch.uint8)


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseRows:
    """A sparse matrix [O, I] by rows (CSR)."""

    offsets: torch.Tensor
    """Where each row starts, int32 [O + 1]; the last is the count of elements."""
    columns: torch.Tensor
    """Column of each element, int16 that is read as unsigned (up to 65,536 columns), else int32."""
    values: torch.Tensor
    """Value of each element, 16 bit."""

    @property
    def count(self) -> int:
        """Stored elements."""
        return int(self.values.numel())

    def positions(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return row and column of each element, int64."""
        import torch

        offsets = self.offsets.long()
        rows = torch.repeat_interleave(torch.arange(offsets.numel() - 1, device=offsets.device), offsets.diff())
        columns = self.columns.long()
        return rows, columns & 0xFFFF if self.columns.dtype == torch.int16 else columns

    def check(self, shape: tuple[int, int], where: str) -> None:
        """Refuse indices that point outside of the matrix.

        Raises:
            RefusedInputError: offsets or columns are not those of a matrix of this shape.
        """
        offsets = self.offsets.long()
        sound = offsets.numel() == shape[0] + 1 and int(offsets[0]) == 0 and int(offsets[-1]) == self.count
        sound = sound and self.columns.numel() == self.count and bool((offsets.diff() >= 0).all())
        if sound and self.count:
            columns = self.positions()[1]
            sound = int(columns.min()) >= 0 and int(columns.max()) < shape[1]
        if not sound:
            rule = f"has offsets or columns that fit no matrix {list(shape)}"
            raise RefusedInputError(Fault(where=where, rule=rule, fix="quantize the model again"))


def sparse_rows(values_OI: torch.Tensor, mask_OI: torch.Tensor, dtype: torch.dtype) -> SparseRows:
    """Return the masked elements of a matrix as a sparse one."""
    import torch

    rows, columns = mask_OI.nonzero(as_tuple=True)
    counts = torch.bincount(rows, minlength=mask_OI.shape[0])
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    narrow = mask_OI.shape[1] <= 1 << 16
    # Through int32, as 40,000 has no place in int16 and must keep its bits.
    stored = columns.int().to(torch.int16) if narrow else columns.int()
    return SparseRows(offsets=offsets, columns=stored, values=values_OI[rows, columns].to(dtype))
