"""Losses between the embeddings of two dual encoders, over the whole batch of all ranks.

Embeddings are L2-normalised, [B, D] of the gathered batch; row i of images belongs to row i of texts. Formulas after
CLIP-KD (arXiv 2307.12732), in fp32 whatever the embeddings' dtype, under autocast too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional


def task_loss(images_BD: torch.Tensor, texts_BD: torch.Tensor, log_scale: torch.Tensor) -> torch.Tensor:
    """Return ``½ (CE(image → text) + CE(text → image))`` of similarities scaled by ``exp(log_scale)``."""
    similarities_BB = _similarities(images_BD, texts_BD, log_scale)
    pairs = torch.arange(len(similarities_BB), device=similarities_BB.device)
    return 0.5 * (functional.cross_entropy(similarities_BB, pairs) + functional.cross_entropy(similarities_BB.T, pairs))


def similarity_loss(
    student: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    teacher: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    temperature: float = 1.0,
) -> torch.Tensor:
    """Return ``½ τ² Σ KL(teacher's similarities | student's)`` over both directions, a mean over rows.

    Both are given as (images, texts, log scale) and use their own scale; embeddings may differ in width.
    """
    own_BB, taught_BB = (_similarities(*model) / temperature for model in (student, teacher))
    total: Any = 0.0
    for own, taught in ((own_BB, taught_BB), (own_BB.T, taught_BB.T)):
        log_q, log_p = own.log_softmax(dim=-1), taught.detach().log_softmax(dim=-1)
        total = total + functional.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
    loss: torch.Tensor = 0.5 * temperature**2 * total
    return loss


def interactive_loss(
    student_images_BD: torch.Tensor,
    student_texts_BD: torch.Tensor,
    teacher_images_BD: torch.Tensor,
    teacher_texts_BD: torch.Tensor,
    log_scale: torch.Tensor,
) -> torch.Tensor:
    """Return ``½ (CE(student image → teacher text) + CE(student text → teacher image))``, with a scale of its own.

    The scale is learned as a logarithm: as a plain factor it could pass through 0.
    """
    pairs = torch.arange(len(student_images_BD), device=student_images_BD.device)
    to_text = functional.cross_entropy(_similarities(student_images_BD, teacher_texts_BD.detach(), log_scale), pairs)
    to_image = functional.cross_entropy(_similarities(student_texts_BD, teacher_images_BD.detach(), log_scale), pairs)
    return 0.5 * (to_text + to_image)


def feature_loss(student_BD: torch.Tensor, teacher_BD: torch.Tensor) -> torch.Tensor:
    """Return ``|student - teacher|²``, the mean over rows; 0 to 4 for normalised embeddings."""
    return (student_BD.float() - teacher_BD.detach().float()).square().sum(dim=-1).mean()


def gather_rows(local_bD: torch.Tensor) -> torch.Tensor:
    """Return the rows of all ranks, [B, D], in the order of ranks; the same number on each.

    The backward pass adds what all ranks' losses say about this rank's rows. Every rank computes the loss of the whole
    batch, so an engine that then averages the ranks' gradients gives exactly the gradient of one process.
    """
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return local_bD
    gathered: torch.Tensor = _GatherRows.apply(local_bD)
    return gathered


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local_bD: torch.Tensor) -> torch.Tensor:
        import torch.distributed as dist

        parts = [torch.empty_like(local_bD.contiguous()) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, local_bD.contiguous())
        ctx.rows = len(local_bD)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient_BD: torch.Tensor) -> torch.Tensor:
        import torch.distributed as dist

        # A copy: autograd may hand the same gradient to others.
        summed = gradient_BD.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed)
        first = ctx.rows * dist.get_rank()
        return summed[first : first + ctx.rows]


def _similarities(rows_BD: torch.Tensor, columns_BD: torch.Tensor, log_scale: torch.Tensor) -> torch.Tensor:
    with torch.autocast(rows_BD.device.type, enabled=False):
        return log_scale.float().exp() * rows_BD.float() @ columns_BD.float().T
