"""Packed codes, and the error feedback of GPTQ, for SpQR and low-rank correction."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...ds_configs.specs.errors import ConfigError, RefusedInputError

# While packed, a code takes a byte per bit. A multiple of 8, so that each block ends at a byte.
_BLOCK_CODES = 1 << 20


def packed_size(count: int, bits: int) -> int:
    """Return the number of bytes of packed codes."""
    return (count * bits + 7) // 8


def pack_bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes 0 to 2^bits - 1 as one stream of bits, uint8: code i starts at bit `i·bits`, lowest bit first.

    >>> pack_bits(torch.tensor([1, 2, 3]), 3).tolist()
    [209, 0]
    """
    import numpy

    flat_N, blocks = codes.reshape(-1).to("cpu", torch.uint8).numpy(), []
    for start in range(0, len(flat_N), _BLOCK_CODES):
        digits = numpy.unpackbits(flat_N[start : start + _BLOCK_CODES, None], axis=1, bitorder="little")
        blocks.append(numpy.packbits(digits[:, :bits], bitorder="little"))
    return torch.from_numpy(numpy.concatenate([flat_N[:0], *blocks])).to(codes.device)


def unpack_bits(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Return the first `count` codes of a stream of bits as uint8."""
    import numpy

    bytes_N, size, blocks = packed.cpu().numpy(), packed_size(_BLOCK_CODES, bits), []
    for start in range(0, len(bytes_N), size):
        digits = numpy.unpackbits(bytes_N[start : start + size], bitorder="little")
        codes = digits[: len(digits) // bits * bits].reshape(-1, bits)
        blocks.append(numpy.packbits(codes, axis=1, bitorder="little")[:, 0])
    return torch.from_numpy(numpy.concatenate([bytes_N[:0], *blocks])[:count]).to(packed.device)


def damaged(where: str, rule: str) -> RefusedInputError:
    """Return the error of a file that does not contain what quantization wrote."""
    return RefusedInputError(ConfigError(where=where, rule=rule, fix="quantize the model again"))


_FEWEST_COLUMNS = 128
"""Smallest number of columns between two updates of all later columns; it affects results only by rounding."""


def weighted_error(difference_OI: torch.Tensor, hessian_II: torch.Tensor | None) -> float:
    """Return `trace(D H Dᵀ)`, the squared error of a layer's outputs; without a Hessian the squared difference."""
    difference_OI = difference_OI.double()
    if hessian_II is None:
        return float(difference_OI.square().sum())
    return float(((difference_OI @ hessian_II.double()) * difference_OI).sum())


def check_matrix(weight_OI: torch.Tensor, hessian_II: torch.Tensor | None) -> None:
    """Check a matrix before quantization.

    Raises:
        RefusedInputError: not two-dimensional, empty, NaN or infinite, or a Hessian of another shape.
    """
    errors, size = [], weight_OI.shape[-1]
    if weight_OI.ndim != 2 or not weight_OI.numel():
        rule = "must be a matrix that is not empty"
        errors.append(ConfigError(where="weight", value=tuple(weight_OI.shape), rule=rule))
    elif not bool(weight_OI.isfinite().all()):
        rule, fix = "contains NaN or infinity", "train it again, or download an intact copy"
        errors.append(ConfigError(where="weight", rule=rule, fix=fix))
    if hessian_II is not None and tuple(hessian_II.shape) != (size, size):
        errors.append(ConfigError(where="Hessian", value=tuple(hessian_II.shape), rule=f"must be [{size}, {size}]"))
    elif hessian_II is not None and not bool(hessian_II.isfinite().all()):
        rule, fix = "contains NaN or infinity: the layer's inputs overflow", "load the model in bf16 or fp32"
        errors.append(ConfigError(where="Hessian", rule=rule, fix=fix))
    if errors:
        raise RefusedInputError(errors)


def inverse_factor(hessian_II: torch.Tensor, dampening: float) -> torch.Tensor:
    """Return the upper triangular U with `(H + λ)⁻¹ = Uᵀ U`, where H has 1 for channels that are always zero.

    λ is `dampening` times the mean diagonal, and is multiplied by 10 until the factor exists. Row j of U is the
    correction of columns after j for an error of `U[j, j]` in column j (GPTQ, arXiv 2210.17323, section 3.3).
    """
    hessian_II = hessian_II.float().clone()
    diagonal_I = hessian_II.diagonal()
    diagonal_I[diagonal_I <= 0] = 1.0
    while True:
        damped_II = hessian_II.clone()
        damped_II.diagonal().add_(dampening * diagonal_I.mean())
        factor_II, failed = torch.linalg.cholesky_ex(damped_II)
        if not int(failed):
            upper_II, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor_II), upper=True)
            if not int(failed):
                return upper_II
        # From here on the inverse is close to that of the diagonal.
        if dampening >= 1:
            return torch.diag(diagonal_I.rsqrt())
        dampening = max(10 * dampening, 1e-4)


class ErrorFeedback:
    """Iterates over the columns of a weight, and distributes each column's error over later columns, as in GPTQ."""

    def __init__(self, weight_OI: torch.Tensor, upper_II: torch.Tensor, *, group_size: int = 1) -> None:
        self.weight_IO = weight_OI.t().float().contiguous()
        self.upper_II = upper_II
        # Whole groups, so that all columns of a group have the same corrections when its first one is visited.
        self._size = -(-_FEWEST_COLUMNS // group_size) * group_size
        self._errors_CO = torch.zeros_like(self.weight_IO[: self._size])

    def columns(self) -> Iterator[int]:
        """Yield each column in turn; call `settle` for it before the next."""
        count = len(self.weight_IO)
        for start in range(0, count, self._size):
            end = min(start + self._size, count)
            self._start, self._end = start, end
            yield from range(start, end)
            errors_CO = self._errors_CO[: end - start]
            self.weight_IO[end:].addmm_(self.upper_II[start:end, end:].t(), errors_CO, alpha=-1)

    def settle(self, column: int, stored_O: torch.Tensor) -> None:
        """Set the stored values of a column, and correct later columns for the difference."""
        error_O = (self.weight_IO[column] - stored_O) / self.upper_II[column, column]
        self._errors_CO[column - self._start] = error_O
        later = slice(column + 1, self._end)
        self.weight_IO[later].addr_(self.upper_II[column, later], error_O, alpha=-1)
        self.weight_IO[column] = stored_O
