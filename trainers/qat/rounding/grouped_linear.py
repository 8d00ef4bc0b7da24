"""Linear layers of all experts of a mixture in one function that keeps no rounded copy of any of them.

Rows of tokens lie sorted by expert, and each expert multiplies its own. Only what exists anyway is saved, the parameter
of all experts and the rows; each matrix is rounded once more when gradients are due, one expert at a time.

Shapes: E experts, T rows of tokens, O output channels, I input channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .rounding import WeightRounding, round_weight

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedRounding:
    """Rounding of the matrices in one parameter [E, O, I]."""

    weight: WeightRounding
    """Every matrix of a checkpoint."""
    matrices: int = 1
    """Matrices of a checkpoint that lie below one another in O: two for gate and up."""


def grouped_fake_quantized_linear(
    rows: Tensor, ends: Sequence[int], weight: Tensor, rounding: GroupedRounding
) -> Tensor:
    """Return ``x_e · round(W_e)ᵀ`` [T, O] for the rows of every expert e, with straight-through gradients.

    The gradient of the parameter is ``dL/dW_e = dL/dy_eᵀ · x_e``, and zero for experts without rows. It computes in the
    type that autocast asks for, or else in that of the rows, as a plain layer does.

    Args:
        rows: [T, I], sorted by expert.
        ends: For each expert the row after its last; one that begins where it ends has none.
        weight: [E, O, I], before rounding.
        rounding: How each matrix is rounded.
    """
    device = rows.device.type
    if torch.is_autocast_enabled(device):
        rows = rows.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):
        found: Tensor = _GroupedLinear.apply(rows, weight, tuple(ends), rounding)
    return found


def rounded_matrices(expert: Tensor, rounding: GroupedRounding) -> Tensor:
    """Return one expert's part [O, I] of a parameter in the numbers of the checkpoint, each matrix for itself."""
    parts = [round_weight(part, rounding.weight).value(rounding.weight) for part in expert.chunk(rounding.matrices)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, ends: tuple[int, ...], rounding: GroupedRounding) -> Tensor:
        ctx.ends, ctx.rounding = ends, rounding
        # Frozen experts pass their gradient on without having seen what came in, as plain layers do.
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weight)
        answer = rows.new_zeros(len(rows), weight.shape[1])
        for expert, first, last in _occupied(ends):
            rounded = rounded_matrices(weight[expert], rounding).to(rows.dtype)
            # DeepSpeed's ZeRO-3 replaces `torch.nn.functional.linear` by a function that saves its weight.
            answer[first:last] = torch.ops.aten.linear.default(rows[first:last], rounded)
        return answer

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        by_rows = gradient.new_zeros(len(gradient), weight.shape[2]) if ctx.needs_input_grad[0] else None
        by_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for expert, first, last in _occupied(ctx.ends):
            part = gradient[first:last]
            if by_rows is not None:
                by_rows[first:last] = part @ rounded_matrices(weight[expert], ctx.rounding).to(part.dtype)
            if by_weight is not None:
                by_weight[expert] = part.t() @ rows[first:last]
        return by_rows, by_weight, None, None


def _occupied(ends: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield experts that have rows, with the first row and the one after the last."""
    first = 0
    for expert, last in enumerate(ends):
        if last > first:
            yield expert, first, last
        first = last
