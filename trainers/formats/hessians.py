"""Second moments of a layer's inputs: what an error in a weight costs, and how later columns make up for it.

Shapes: O output channels, I input channels, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...ds_configs.specs.errors import Fault, RefusedInputError

if TYPE_CHECKING:
    import torch

COLUMNS_AT_ONCE = 128
"""Columns between two updates of all columns that follow; the result does not depend on it but for rounding."""
# Dampening of the mean diagonal itself: beyond it the inverse says nothing but the diagonal, which is taken.
_LARGEST_DAMPENING = 1.0


def weighted_error(difference_OI: torch.Tensor, hessian_II: torch.Tensor | None) -> float:
    """Return `trace(D H Dᵀ)`, the summed squared error of a layer's outputs; the plain square without a Hessian."""
    difference_OI = difference_OI.double()
    if hessian_II is None:
        return float(difference_OI.square().sum())
    return float(((difference_OI @ hessian_II.double()) * difference_OI).sum())


def check_matrix(weight_OI: torch.Tensor, hessian_II: torch.Tensor | None, *, where: str = "weight") -> None:
    """Refuse a matrix that no method can work on.

    Raises:
        RefusedInputError: not two-dimensional, empty, NaN or infinite, or a Hessian of another shape.
    """
    faults = []
    if weight_OI.ndim != 2 or not weight_OI.numel():
        faults.append(Fault(where=where, value=tuple(weight_OI.shape), rule="must be a matrix with elements"))
    elif not bool(weight_OI.isfinite().all()):
        faults.append(Fault(where=where, rule="holds NaN or infinity", fix="train it again, or fetch a sound copy"))
    if hessian_II is not None:
        size = weight_OI.shape[-1]
        if tuple(hessian_II.shape) != (size, size):
            rule = f"must be [{size}, {size}]"
            faults.append(Fault(where=f"{where}: Hessian", value=tuple(hessian_II.shape), rule=rule))
        elif not bool(hessian_II.isfinite().all()):
            rule, fix = "holds NaN or infinity", "the layer's inputs overflow; load the model in bf16 or fp32"
            faults.append(Fault(where=f"{where}: Hessian", rule=rule, fix=fix))
    if faults:
        raise RefusedInputError(faults)


def damped(hessian_II: torch.Tensor, dampening: float) -> torch.Tensor:
    """Return the fp32 Hessian with 1 for channels that are always zero, plus `dampening` of its mean diagonal."""
    hessian_II = hessian_II.float().clone()
    diagonal_I = hessian_II.diagonal()
    diagonal_I[diagonal_I <= 0] = 1.0
    diagonal_I += dampening * diagonal_I.mean()
    return hessian_II


def inverse_factor(hessian_II: torch.Tensor, dampening: float) -> torch.Tensor:
    """Return the upper triangular U with `(H + λ)⁻¹ = Uᵀ U`, λ raised tenfold until the factor exists.

    Row j of U says how columns after j change when column j is off by `U[j, j]` (GPTQ, arXiv 2210.17323, section 3.3).
    """
    import torch

    while True:
        factor_II, failed = torch.linalg.cholesky_ex(damped(hessian_II, dampening))
        if not int(failed):
            upper_II, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor_II), upper=True)
            if not int(failed):
                return upper_II
        if dampening >= _LARGEST_DAMPENING:
            return torch.diag(damped(hessian_II, 0.0).diagonal().rsqrt())
        dampening = max(10 * dampening, 1e-4)


class ErrorFeedback:
    """Walks over the columns of a weight, transposed to [I, O], and spreads each column's error over later ones."""

    def __init__(self, weight_OI: torch.Tensor, upper_II: torch.Tensor) -> None:
        import torch

        self.weight_IO = weight_OI.t().float().contiguous()
        self.upper_II = upper_II
        self._errors_CO = torch.zeros_like(self.weight_IO[:COLUMNS_AT_ONCE])

    def columns(self) -> Iterator[int]:
        """Yield each column in turn; `settle` must be called for it before the next."""
        count = len(self.weight_IO)
        for start in range(0, count, COLUMNS_AT_ONCE):
            end = min(start + COLUMNS_AT_ONCE, count)
            self._start, self._end = start, end
            yield from range(start, end)
            errors_CO = self._errors_CO[: end - start]
            self.weight_IO[end:].addmm_(self.upper_II[start:end, end:].t(), errors_CO, alpha=-1)

    def settle(self, column: int, stored_O: torch.Tensor) -> None:
        """Say what is stored in place of a column; those that follow are corrected for the difference."""
        error_O = (self.weight_IO[column] - stored_O) / self.upper_II[column, column]
        self._errors_CO[column - self._start] = error_O
        later = slice(column + 1, self._end)
        self.weight_IO[later].addr_(self.upper_II[column, later], error_O, alpha=-1)
        self.weight_IO[column] = stored_O

    def look_ahead(self, columns: range) -> torch.Tensor:
        """Return columns as all settled ones have made them, [C, O], also those beyond the current block."""
        import torch

        weight_CO = self.weight_IO[columns.start : columns.stop]
        if columns.stop <= self._end:
            return weight_CO
        pending = columns.start - self._start
        inside = self._end - columns.start
        correction_CO = (
            self.upper_II[self._start : columns.start, self._end : columns.stop].t() @ self._errors_CO[:pending]
        )
        return torch.cat([weight_CO[:inside], weight_CO[inside:] - correction_CO])
