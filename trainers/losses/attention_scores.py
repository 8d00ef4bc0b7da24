"""Attention scores of TinyBERT, recomputed from queries and keys, so that the models keep their fast kernels.

Shapes: B samples, H heads of queries, K heads of keys, S positions, D head width, R rows of one block, M matched heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ...plugins.transformers.attention_capture import AttentionTensor, LayerAttention
from .attention_relations import Visibility, row_blocks

if TYPE_CHECKING:
    import torch

HeadMatching = Literal["interpolate", "average"]
_READ: tuple[AttentionTensor, ...] = ("query", "key")


def score_sum(
    student: LayerAttention,
    teacher: LayerAttention,
    weights_BS: torch.Tensor,
    visible: Visibility,
    *,
    heads: HeadMatching = "interpolate",
) -> torch.Tensor:
    """Return ``Σ_t w_t · 1/M · Σ_m 1/n_t · Σ_j (s^S_mtj - s^T_mtj)²``, an fp32 scalar, over the n_t positions seen.

    s = q kᵀ · scaling, before masks, soft-caps and the softmax (TinyBERT, arXiv 1909.10351, equation 7, which takes
    the mean over all positions). Where the numbers of heads differ, `heads` tells how they are matched. Scores are
    computed again in the backward pass, block by block.
    """
    import torch
    from torch.utils.checkpoint import checkpoint

    with torch.autocast(weights_BS.device.type, enabled=False):
        query, key = (student.tensor(name).float() for name in _READ)
        taught_query, taught_key = (teacher.tensor(name).detach().float() for name in _READ)
        own_mixture, taught_mixture = (
            mixture.to(weights_BS.device) for mixture in head_mixtures(query.shape[1], taught_query.shape[1], heads)
        )

        def block(query: torch.Tensor, key: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
            seen_BRS = visible.rows(rows_R)
            learned = _scores(query, key, rows_R, student.scaling)
            taught = _scores(taught_query, taught_key, rows_R, teacher.scaling)
            difference = _mixed(own_mixture, learned) - _mixed(taught_mixture, taught)
            squares = difference.masked_fill(~seen_BRS[:, None], 0.0).square().sum(dim=-1).mean(dim=1)
            return squares / seen_BRS.sum(dim=-1).clamp(min=1)

        elements = weights_BS.shape[0] * max(query.shape[1], taught_query.shape[1]) * visible.size
        total = torch.zeros((), dtype=torch.float32, device=weights_BS.device)
        for rows_R in row_blocks(weights_BS, elements):
            distance_BR = checkpoint(block, query, key, rows_R, use_reentrant=False, preserve_rng_state=False)
            total = total + (weights_BS[:, rows_R].float() * distance_BR).sum()
        return total


def head_mixtures(student_heads: int, teacher_heads: int, kind: HeadMatching) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two matrices [M, heads] that make the same number of scores of both models' heads.

    Equal numbers are matched one by one. ``interpolate``: M = student heads, and the teacher's are interpolated
    linearly along the head axis, first with first and last with last. ``average``, and a student with one head: M = 1,
    the mean over heads of each.
    """
    import torch

    if student_heads == teacher_heads:
        return torch.eye(student_heads), torch.eye(teacher_heads)
    if kind == "average" or student_heads == 1:
        return torch.full((1, student_heads), 1 / student_heads), torch.full((1, teacher_heads), 1 / teacher_heads)
    places_M = torch.linspace(0, teacher_heads - 1, student_heads, dtype=torch.float64)
    distances_MH = (places_M[:, None] - torch.arange(teacher_heads)).abs()
    return torch.eye(student_heads), (1 - distances_MH).clamp(min=0).float()


def _scores(query_BHSD: torch.Tensor, key_BKSD: torch.Tensor, rows_R: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return scores [B, H, R, S]; consecutive query heads share a key head."""
    grouped = query_BHSD.index_select(2, rows_R).unflatten(1, (key_BKSD.shape[1], -1))
    return (grouped @ key_BKSD[:, :, None].transpose(-1, -2) * scaling).flatten(1, 2)


def _mixed(mixture_MH: torch.Tensor, scores_BHRS: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.einsum("mh,bhrs->bmrs", mixture_MH, scores_BHRS)
