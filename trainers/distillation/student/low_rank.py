"""Weight matrices of low rank, as the starting point of a student whose linear layers will be factorised.

What is stored is the product, because no Transformers checkpoint has factorised linear layers: it loads everywhere, and
is as large as before. Factors of rank r would hold r · (m + n) numbers instead of m · n.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class LowRank:
    """Approximation of a matrix."""

    rank: int
    """Singular values kept."""
    full_rank: int
    """Smaller side of the matrix."""
    energy: float
    """Σ σ² of the kept singular values over Σ σ² of all; 1 for a matrix of zeros."""


def low_rank(
    weight_MN: torch.Tensor, *, rank: int | None = None, energy: float | None = None
) -> tuple[torch.Tensor, LowRank]:
    """Return the nearest matrix of a rank, in the Frobenius norm, and what it keeps.

    W = U Σ Vᵀ, cut after `rank` singular values or after the fewest whose squares are `energy` of all (Eckart and
    Young 1936). The result has the dtype of `weight_MN`; a matrix that keeps its full rank is returned as it is.
    """
    import torch

    assert (rank is None) != (energy is None), "give a rank or an energy"
    left_MK, values_K, right_KN = torch.linalg.svd(weight_MN.float(), full_matrices=False)
    squares_K = values_K.double().square()
    total = float(squares_K.sum())
    full_rank = len(values_K)
    if rank is None:
        # Sums in fp64 still end a little below the total that asks for all of it.
        reached_K = squares_K.cumsum(0) >= min(float(energy or 0), 1.0) * total * (1 - 1e-12)
        rank = int(reached_K.int().argmax()) + 1
    rank = min(rank, full_rank)
    product_MN = (left_MK[:, :rank] * values_K[:rank]) @ right_KN[:rank]
    found = LowRank(
        rank=rank,
        full_rank=full_rank,
        energy=float(squares_K[:rank].sum()) / total if total else 1.0,
    )
    return (weight_MN if rank == full_rank else product_MN.to(weight_MN.dtype)), found
