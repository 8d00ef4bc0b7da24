"""Losses between hidden states, attention scores and attention relations of two models, and layer matching."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from ...ds_configs.specs.errors import ConfigError, UsageError
from ...plugins.transformers.attention_capture import AttentionTensor, LayerAttention
from .objective import divergence_and_gradient, divergence_rows

if TYPE_CHECKING:
    import torch

HiddenStateKind = Literal["mse", "cosine"]
_LEAST_POWER = 1e-12
"""Lower limit of the mean square of a teacher's vector, a divisor."""


def hidden_state_sum(
    student_TD: torch.Tensor,
    teacher_TD: torch.Tensor,
    weights_T: torch.Tensor,
    *,
    kind: HiddenStateKind = "mse",
    normalize: bool = True,
) -> torch.Tensor:
    """Return ``Σ_t w_t · |h_s - h_t|² / D``, or ``Σ_t w_t · (1 - cos(h_s, h_t))``, as an fp32 scalar.

    ``normalize`` divides each token's term by the mean square of that token's teacher vector, so that the huge
    activations of some tokens do not outweigh all others, and sums over parts of a batch still add up. Squared error:
    FitNets (arXiv 1412.6550), TinyBERT (arXiv 1909.10351); cosine: DistilBERT (arXiv 1910.01108).
    """
    import torch

    with torch.autocast(student_TD.device.type, enabled=False):
        student, teacher, weights = student_TD.float(), teacher_TD.detach().float(), weights_T.float()
        if kind == "cosine":
            return (weights * (1.0 - torch.nn.functional.cosine_similarity(student, teacher, dim=-1))).sum()
        distance_T = (student - teacher).square().mean(dim=-1)
        if normalize:
            distance_T = distance_T / teacher.square().mean(dim=-1).clamp(min=_LEAST_POWER)
        return (weights * distance_T).sum()


def projectors(student_width: int, teacher_width: int, count: int) -> torch.nn.ModuleList:
    """Return `count` linear maps without bias from the student's width to the teacher's, as a ModuleList in fp32.

    All start as the same semi-orthogonal matrix, since a residual stream has one basis for all layers, scaled so that
    a random vector keeps its root mean square. The matrix has a fixed seed; the global seed is not changed.
    """
    import torch

    weight_DH = torch.empty(teacher_width, student_width)
    torch.nn.init.orthogonal_(weight_DH, generator=torch.Generator().manual_seed(0))
    weight_DH *= max(1.0, teacher_width / student_width) ** 0.5
    return torch.nn.ModuleList(_projector_class()(weight_DH.clone()) for _ in range(count))


@cache
def _projector_class() -> Any:
    import torch

    class Projector(torch.nn.Module):
        """Linear map in fp32 for any dtype of the weight; a module, so that engines can gather it."""

        def __init__(self, weight_DH: torch.Tensor) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(weight_DH)

        def forward(self, hidden_TH: torch.Tensor) -> torch.Tensor:
            with torch.autocast(hidden_TH.device.type, enabled=False):
                return torch.nn.functional.linear(hidden_TH.float(), self.weight.float())

    return Projector


LayerMapKind = Literal["uniform", "interpolate"]
LayerPairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class LayerMatch:
    """A student layer and the weighted mean of teacher layers that it is compared with."""

    student: int
    teacher: tuple[tuple[int, float], ...]
    """One or two teacher layers with their weights, which add up to 1."""


def layer_map(student_layers: int, teacher_layers: int, kind: LayerMapKind = "uniform") -> tuple[LayerMatch, ...]:
    """Match layers 0 to L_s of a student with layers of a teacher: embedding with embedding, last with last.

    ``uniform``: φ(l) = round(l · L_t / L_s), halves rounded up. ``interpolate``: the two teacher layers around
    l · L_t / L_s, weighted linearly.

    Raises:
        UsageError: a model without layers.
    """
    _check_depths(student_layers, teacher_layers)
    matches = []
    for student in range(student_layers + 1):
        position = student * teacher_layers
        if kind == "uniform":
            teacher: tuple[tuple[int, float], ...] = (((2 * position + student_layers) // (2 * student_layers), 1.0),)
        else:
            lower, remainder = divmod(position, student_layers)
            share = remainder / student_layers
            teacher = ((lower, 1.0),) if not remainder else ((lower, 1.0 - share), (lower + 1, share))
        matches.append(LayerMatch(student=student, teacher=teacher))
    return tuple(matches)


def paired_layers(
    pairs: Sequence[tuple[int, int]],
    student_layers: int,
    teacher_layers: int,
    *,
    first: int = 0,
    where: str = "layers",
) -> tuple[LayerMatch, ...]:
    """Match the layers that a user paired; `first` is 1 if the embedding cannot be matched.

    Raises:
        UsageError: layers that do not exist, all together.
    """
    _check_depths(student_layers, teacher_layers)
    errors = []
    for pair in pairs:
        for side, number, last in zip(("student", "teacher"), pair, (student_layers, teacher_layers), strict=True):
            if not first <= number <= last:
                errors.append(ConfigError(where=where, value=pair, rule=f"{side} layers are {first} to {last}"))
    if errors:
        raise UsageError(errors)
    return tuple(LayerMatch(student=student, teacher=((teacher, 1.0),)) for student, teacher in pairs)


def pair_errors(where: str, pairs: object) -> list[ConfigError]:
    """Return the errors in the form of explicit pairs."""
    rule = "pairs of (student layer, teacher layer), each pair once"
    if not isinstance(pairs, tuple) or not pairs:
        return [ConfigError(where=where, value=pairs, rule=rule)]
    # `type`, because `isinstance` accepts booleans as integers.
    bad = [p for p in pairs if not (isinstance(p, tuple) and len(p) == 2 and all(type(number) is int for number in p))]
    bad = bad or sorted({pair for pair in pairs if pairs.count(pair) > 1})
    return [ConfigError(where=where, value=pair, rule=rule) for pair in bad]


def _check_depths(student_layers: int, teacher_layers: int) -> None:
    depths = {"student": student_layers, "teacher": teacher_layers}
    errors = [
        ConfigError(where=f"layers of the {side}", value=depth, rule="must be at least 1 to match layers")
        for side, depth in depths.items()
        if depth < 1
    ]
    if errors:
        raise UsageError(errors)


BLOCK_ELEMENTS = 2**24
"""Elements of the largest tensor of one block; about eight such fp32 tensors exist at the same time."""
_INVISIBLE = -1e9
"""Logit of a masked position: its probability is 0 in fp32, and its differences are finite."""


@dataclass(frozen=True, kw_only=True)
class Visibility:
    """Positions that a position attends to, computed for some rows at a time."""

    size: int
    causal: bool
    window: int | None = None
    """Positions that a position attends to, itself included; `None`: all."""
    real_BS: torch.Tensor | None = None
    """False at padding; `None`: no padding."""
    documents_BS: torch.Tensor | None = None
    """Number of the packed document of each position; `None`: one per row."""

    def rows(self, rows_R: torch.Tensor) -> torch.Tensor:
        """Return the visible positions of some rows, bool [B or 1, R, S]."""
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
    """Read padding from ``attention_mask``, and packed documents from the jumps in ``position_ids``.

    Raises:
        UsageError: the attention mask is not [B, S].
    """
    import torch

    mask: Any = inputs.get("attention_mask")
    positions: Any = inputs.get("position_ids")
    if mask is not None and (not torch.is_tensor(mask) or mask.dim() != 2):
        shape = tuple(mask.shape) if torch.is_tensor(mask) else type(mask).__name__
        rule = "attention can only be matched with masks [B, S]"
        raise UsageError(ConfigError(where="attention_mask", value=shape, rule=rule))
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
    The softmax is over visible positions.

    Raises:
        UsageError: A does not divide both widths.
    """
    import torch

    widths = [tensor.shape[1] * tensor.shape[3] for tensor in (student_BHSD, teacher_BHSD)]
    # The teacher's heads if they divide the student's width, else their greatest common divisor.
    heads = relation_heads or math.gcd(widths[0], teacher_BHSD.shape[1])
    if any(width % heads for width in widths):
        rule = f"must divide the widths {widths[0]} of the student and {widths[1]} of the teacher"
        fix = f"use a divisor of {math.gcd(*widths)}"
        raise UsageError(ConfigError(where="relation_heads", value=heads, rule=rule, fix=fix))
    with torch.autocast(student_BHSD.device.type, enabled=False):
        # Heads joined and split into relation heads [B, A, S, d], scaled by d^-¼, so that products carry 1/√d.
        joined = (tensor.transpose(1, 2).flatten(2).float() for tensor in (student_BHSD, teacher_BHSD.detach()))
        split = (tensor_BSW.unflatten(2, (heads, -1)).transpose(1, 2) for tensor_BSW in joined)
        student, teacher = (vectors_BASd * vectors_BASd.shape[-1] ** -0.25 for vectors_BASd in split)
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
    """Return the sum and its gradient ``∂/∂m_i = Σ_j (g_ij + g_ji) m_j``, g the gradient by ``m_i · m_j``."""
    import torch

    batch, heads, size, _ = student_BASd.shape
    total = weights_BS.new_zeros(())
    gradient = torch.zeros_like(student_BASd) if differentiates else None
    for rows_R in row_blocks(weights_BS, batch * heads * size):
        seen = visible.rows(rows_R)[:, None]
        products = (
            vectors.index_select(2, rows_R) @ vectors.transpose(2, 3) for vectors in (teacher_BASd, student_BASd)
        )
        taught, learned = (torch.log_softmax(product.masked_fill(~seen, _INVISIBLE), dim=-1) for product in products)
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


def row_blocks(weights_BS: torch.Tensor, elements: int) -> tuple[torch.Tensor, ...]:
    """Split the rows that have a weight in any sample; ``elements`` is the size of the largest tensor per row."""
    rows = weights_BS.ne(0).any(dim=0).nonzero().squeeze(1)
    return tuple(rows.split(max(1, BLOCK_ELEMENTS // elements))) if len(rows) else ()


_READ: tuple[AttentionTensor, ...] = ("query", "key")


def score_sum(
    student: LayerAttention, teacher: LayerAttention, weights_BS: torch.Tensor, visible: Visibility
) -> torch.Tensor:
    """Return ``Σ_t w_t · 1/M · Σ_m 1/n_t · Σ_j (s^S_mtj - s^T_mtj)²``, an fp32 scalar, over the n_t visible positions.

    s = q kᵀ · scaling, before masks, soft-caps and the softmax (TinyBERT, arXiv 1909.10351, equation 7, which takes
    the mean over all positions). If the numbers of heads differ, `head_mixtures` matches them. Scores are
    recomputed in the backward pass, block by block.
    """
    import torch
    from torch.utils.checkpoint import checkpoint

    with torch.autocast(weights_BS.device.type, enabled=False):
        query, key = (student.tensor(name).float() for name in _READ)
        taught_query, taught_key = (teacher.tensor(name).detach().float() for name in _READ)
        own_mixture, taught_mixture = (
            mixture.to(weights_BS.device) for mixture in head_mixtures(query.shape[1], taught_query.shape[1])
        )

        def block(query: torch.Tensor, key: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
            seen_BRS = visible.rows(rows_R)
            learned = _scores(query, key, rows_R, student.scaling)
            taught = _scores(taught_query, taught_key, rows_R, teacher.scaling)
            learned = torch.einsum("mh,bhrs->bmrs", own_mixture, learned)
            difference = learned - torch.einsum("mh,bhrs->bmrs", taught_mixture, taught)
            squares = difference.masked_fill(~seen_BRS[:, None], 0.0).square().sum(dim=-1).mean(dim=1)
            return squares / seen_BRS.sum(dim=-1).clamp(min=1)

        elements = weights_BS.shape[0] * max(query.shape[1], taught_query.shape[1]) * visible.size
        total = torch.zeros((), dtype=torch.float32, device=weights_BS.device)
        for rows_R in row_blocks(weights_BS, elements):
            distance_BR = checkpoint(block, query, key, rows_R, use_reentrant=False, preserve_rng_state=False)
            total = total + (weights_BS[:, rows_R].float() * distance_BR).sum()
        return total


def head_mixtures(student_heads: int, teacher_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two matrices [M, heads] that map both models' heads to the same number of scores.

    Equal numbers are matched one to one. Otherwise M = student heads, and the teacher's are interpolated linearly along
    the head axis, first with first and last with last; a student with one head is compared with the mean of all.
    """
    import torch

    if student_heads == teacher_heads:
        return torch.eye(student_heads), torch.eye(teacher_heads)
    if student_heads == 1:
        return torch.eye(1), torch.full((1, teacher_heads), 1 / teacher_heads)
    positions_M = torch.linspace(0, teacher_heads - 1, student_heads, dtype=torch.float64)
    distances_MH = (positions_M[:, None] - torch.arange(teacher_heads)).abs()
    return torch.eye(student_heads), (1 - distances_MH).clamp(min=0).float()


def _scores(query_BHSD: torch.Tensor, key_BKSD: torch.Tensor, rows_R: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return scores [B, H, R, S]; consecutive query heads share a key head."""
    grouped = query_BHSD.index_select(2, rows_R).unflatten(1, (key_BKSD.shape[1], -1))
    return (grouped @ key_BKSD[:, :, None].transpose(-1, -2) * scaling).flatten(1, 2)
