"""Zeros in weight matrices: the weights, or whole rows, that matter least by their size."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from .request import Granularity, Prune


def sparse(
    weight: torch.Tensor, sparsity: float, *, prune: Prune, granularity: Granularity, output_axis: int = 0
) -> torch.Tensor:
    """Return a copy of a matrix with round(`sparsity` · n) zeros, n being its weights or its rows.

    ``unstructured`` zeroes the smallest |w| of the matrix. ``magnitude`` leaves the others as they are; ``l1`` also
    shrinks them by the threshold, sign(w) · (|w| - λ), which minimises ½ ‖W' - W‖² + λ ‖W'‖₁ (the step that training
    with an L1 penalty takes) where λ is the largest |w| that becomes zero.
    ``row`` zeroes the rows (of one output, along `output_axis`) with the smallest L2 norm (``magnitude``) or L1 norm
    (``l1``).
    """
    if granularity == "row":
        return _without_rows(weight, sparsity, 1 if prune == "l1" else 2, output_axis)
    sizes = weight.abs().flatten()
    smallest = sizes.topk(round(sparsity * sizes.numel()), largest=False)
    if not len(smallest.indices):
        return weight.clone()
    pruned = weight.flatten().clone()
    if prune == "l1":
        pruned = pruned.sign() * (sizes - smallest.values.max())
    pruned[smallest.indices] = 0
    return pruned.reshape(weight.shape)


def _without_rows(weight: torch.Tensor, sparsity: float, order: int, output_axis: int) -> torch.Tensor:
    norms = weight.float().norm(p=order, dim=1 - output_axis)
    rows = norms.topk(round(sparsity * len(norms)), largest=False).indices
    return weight.index_fill(output_axis, rows, 0)


def zero_share(weights: torch.Tensor) -> float:
    """Return the share of the elements that are zero."""
    return float((weights == 0).double().mean())
