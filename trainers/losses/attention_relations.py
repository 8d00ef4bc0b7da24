"""Self-attention relations of MiniLM, as sums over tokens that never hold [S, S] for all rows.

Shapes: B samples, S positions, A relation heads, R rows of one block; W width of all heads together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...ds_configs.specs.errors import Fault, UsageError
from .divergences import divergence_and_gradient, divergence_rows

if TYPE_CHECKING:
    import torch

BLOCK_ELEMENTS = 2**24
"""Elements of the largest tensor of one block; about eight of them exist at once, in fp32."""
_INVISIBLE = -1e9
"""Logit of a position that is not seen: its probability is 0 in fp32, and differences of it are finite."""


@dataclass(frozen=True, kw_only=True)
class Visibility:
    """Positions that a position may see, worked out for some rows at a time."""

    size: int
    """Number of positions S."""
    causal: bool
    """Whether positions see only themselves and what is before."""
    window: int | None = None
    """Number of positions that a position sees, itself included; `None`: all."""
    real_BS: torch.Tensor | None = None
    """False at padding; `None`: there is none."""
    documents_BS: torch.Tensor | None = None
    """Number of the packed document of each position; `None`: each row is one."""

    def rows(self, rows_R: torch.Tensor) -> torch.Tensor:
        """Return what some rows see, of shape [B or 1, R, S]."""
        import torch

        keys_S = torch.arange(self.size, device=rows_R.device)
        ahead_RS = keys_S - rows_R[:, None]
        visible = (ahead_RS <= 0 if self.causal else torch.ones_like(ahead_RS, dtype=torch.bool))[None]
        if self.window is not None:
            visible = visible & (ahead_RS.abs() < self.window)
        if self.real_BS is not None:
            visible = visible & self.real_BS[:, None, :]
        if self.documents_BS is not None:
            visible = visible & (self.documents_BS[:, rows_R, None] == self.documents_BS[:, None, :])
        return visible


def visibility(inputs: Mapping[str, Any], size: int, *, causal: bool, window: int | None = None) -> Visibility:
    """Read padding from ``attention_mask`` and packed documents from ``position_ids``: each begins where they jump.

    Raises:
        UsageError: an attention mask that is not [B, S].
    """
    import torch

    mask: Any = inputs.get("attention_mask")
    positions: Any = inputs.get("position_ids")
    if mask is not None and (not torch.is_tensor(mask) or mask.dim() != 2):
        shape = tuple(mask.shape) if torch.is_tensor(mask) else type(mask).__name__
        raise UsageError(Fault(where="attention_mask", value=shape, rule="attention is matched with masks [B, S] only"))
    documents = None
    if torch.is_tensor(positions) and positions.dim() == 2 and positions.shape[1] == size:
        jumps = positions.diff(dim=1) != 1
        documents = torch.nn.functional.pad(jumps.cumsum(dim=1), (1, 0))
    return Visibility(
        size=size,
        causal=causal,
        window=window,
        real_BS=None if mask is None else mask.bool(),
        documents_BS=documents,
    )


def default_relation_heads(student_width: int, teacher_heads: int) -> int:
    """Return the teacher's number of heads where the student's width W can be split so, else their common divisor."""
    return math.gcd(student_width, teacher_heads)


def relation_sum(
    student_BHSD: torch.Tensor,
    teacher_BHSD: torch.Tensor,
    weights_BS: torch.Tensor,
    visible: Visibility,
    *,
    relation_heads: int | None = None,
) -> torch.Tensor:
    """Return ``Σ_t w_t · 1/A · Σ_a KL(R^T_at | R^S_at)``, an fp32 scalar, with ``R_a = softmax(M_a M_aᵀ / √d)``.

    M are queries, keys or values: their heads are joined into one width W and split again into A relation heads of
    width d = W / A, so that heads and widths of the two models may differ (MiniLMv2, arXiv 2012.15828, section 3.1).
    Rows see what attention lets them see.

    Raises:
        UsageError: A does not divide both widths.
    """
    import torch

    widths = [tensor.shape[1] * tensor.shape[3] for tensor in (student_BHSD, teacher_BHSD)]
    heads = relation_heads or default_relation_heads(widths[0], teacher_BHSD.shape[1])
    if any(width % heads for width in widths):
        rule = f"must divide the widths {widths[0]} of the student and {widths[1]} of the teacher"
        fix = f"choose a divisor of {math.gcd(*widths)}"
        raise UsageError(Fault(where="relation_heads", value=heads, rule=rule, fix=fix))
    with torch.autocast(student_BHSD.device.type, enabled=False):
        student, teacher = (_relation_vectors(tensor, heads) for tensor in (student_BHSD, teacher_BHSD.detach()))
        differentiates = torch.is_grad_enabled() and student.requires_grad
        with torch.no_grad():
            total, gradient = _sum_and_gradient(student, teacher, weights_BS.float(), visible, differentiates)
        if gradient is not None:
            product = (student * gradient).sum()
            total = total + (product - product.detach())
        return total


def _sum_and_gradient(
    student_BASd: torch.Tensor,
    teacher_BASd: torch.Tensor,
    weights_BS: torch.Tensor,
    visible: Visibility,
    differentiates: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the sum and its gradient ``∂/∂m_i = Σ_j (g_ij + g_ji) m_j``, g that for the products ``m_i · m_j``."""
    import torch

    batch, heads, size, _ = student_BASd.shape
    total = weights_BS.new_zeros(())
    gradient = torch.zeros_like(student_BASd) if differentiates else None
    for rows_R in row_blocks(weights_BS, batch * heads * size):
        seen = visible.rows(rows_R)[:, None]
        taught, learned = (_log_relations(vectors, rows_R, seen) for vectors in (teacher_BASd, student_BASd))
        weights_BAR = (weights_BS[:, None, rows_R] / heads).expand(batch, heads, -1)
        if gradient is None:
            total += (weights_BAR * divergence_rows("forward_kl", learned, taught, 0.0)).sum()
            continue
        distance_BAR, slope_BARS = divergence_and_gradient("forward_kl", learned, taught, 0.0)
        total += (weights_BAR * distance_BAR).sum()
        slope_BARS.mul_(weights_BAR[..., None])
        gradient.index_add_(2, rows_R, slope_BARS @ student_BASd)
        gradient += slope_BARS.transpose(2, 3) @ student_BASd.index_select(2, rows_R)
    return total, gradient


def _relation_vectors(tensor_BHSD: torch.Tensor, heads: int) -> torch.Tensor:
    """Join heads and split them into relation heads [B, A, S, d], scaled by d^-¼, so that products carry 1/√d."""
    joined = tensor_BHSD.transpose(1, 2).flatten(2).float()
    split = joined.unflatten(2, (heads, -1)).transpose(1, 2)
    return split * split.shape[-1] ** -0.25


def _log_relations(vectors_BASd: torch.Tensor, rows_R: torch.Tensor, seen_BARS: torch.Tensor) -> torch.Tensor:
    import torch

    products = vectors_BASd.index_select(2, rows_R) @ vectors_BASd.transpose(2, 3)
    return torch.log_softmax(products.masked_fill(~seen_BARS, _INVISIBLE), dim=-1)


def row_blocks(weights_BS: torch.Tensor, elements: int) -> tuple[torch.Tensor, ...]:
    """Split the rows that any sample gives a weight; ``elements`` is the largest tensor's size for one row."""
    rows = weights_BS.ne(0).any(dim=0).nonzero().squeeze(1)
    return tuple(rows.split(max(1, BLOCK_ELEMENTS // elements))) if len(rows) else ()
