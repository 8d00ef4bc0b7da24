"""Arithmetic of routing: the balance loss over all ranks, and what training logs about experts.

Shape suffixes: T tokens of this rank, E experts of a layer, K experts that a token visits, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutedTokens:
    """Choices of one layer's router for the tokens of this rank."""

    logits_TE: Tensor
    """Before softmax or sigmoid, with their graph."""
    selected_TK: Tensor
    """The experts of each token."""
    sent: Tensor
    """Assignments that were sent to experts, padding included."""


def assigned_to(routed: RoutedTokens, mask_T: Tensor | None) -> Tensor:
    """Return the assignments of each expert [E] in fp32, without those of padding."""
    import torch

    count_E = torch.zeros(routed.logits_TE.shape[1], dtype=torch.float32, device=routed.logits_TE.device)
    weight = torch.ones_like(routed.selected_TK, dtype=torch.float32)
    if mask_T is not None:
        weight = weight * mask_T[:, None]
    return count_E.scatter_add_(0, routed.selected_TK.reshape(-1), weight.reshape(-1))


def balance_loss_share(
    layers: Sequence[RoutedTokens], mask_T: Tensor | None, sum_over_ranks: Callable[[Tensor], None]
) -> Tensor:
    """Return this rank's part of the balance loss of a micro-batch; the parts of all ranks add up to the loss.

    `E * sum_e f_e * P_e`, where `f_e` is the number of assignments of expert e for each token and `P_e` the mean of its
    probability, both over the tokens of all layers and all ranks (Switch Transformer, arXiv 2101.03961, eq. 4-6, as in
    transformers/models/mixtral/modeling_mixtral.py `load_balancing_loss_func`; over ranks as in arXiv 2501.11873).
    `f` has no gradient, so that the parts need no communication of their own in the backward pass.

    Args:
        layers: All layers with experts.
        mask_T: 1 for tokens and 0 for padding; `None` without padding.
        sum_over_ranks: Adds a tensor up over the data-parallel ranks, in place.
    """
    import torch

    first = layers[0].logits_TE
    probability_E = first.new_zeros(first.shape[1], dtype=torch.float32)
    tokens_and_assigned = first.new_zeros(1 + first.shape[1], dtype=torch.float32)
    for routed in layers:
        each_TE = torch.softmax(routed.logits_TE.float(), dim=-1)
        tokens = each_TE.shape[0] if mask_T is None else mask_T.sum()
        probability_E = probability_E + (each_TE if mask_T is None else each_TE * mask_T[:, None]).sum(0)
        with torch.no_grad():
            tokens_and_assigned[0] += tokens
            tokens_and_assigned[1:] += assigned_to(routed, mask_T)
    sum_over_ranks(tokens_and_assigned)
    tokens, assigned_E = tokens_and_assigned[0], tokens_and_assigned[1:]
    return first.shape[1] * (assigned_E / tokens * probability_E / tokens).sum()


def entropy_sum(routed: RoutedTokens, mask_T: Tensor | None, *, sigmoid: bool) -> Tensor:
    """Return the entropy of the router over its tokens, added up, in nats; sigmoid scores are divided by their sum."""
    import torch

    logits_TE = routed.logits_TE.detach().float()
    log_TE = torch.nn.functional.logsigmoid(logits_TE) if sigmoid else logits_TE
    log_TE = torch.log_softmax(log_TE, dim=-1)
    entropy_T = -(log_TE.exp() * log_TE).sum(-1)
    return (entropy_T if mask_T is None else entropy_T * mask_T).sum()


def loads(assigned_LE: Tensor) -> tuple[float, float]:
    """Return how much more the fullest expert of a layer gets than the mean one, on average over layers and at worst.

    >>> import torch
    >>> loads(torch.tensor([[2.0, 2.0], [3.0, 1.0]]))
    (1.25, 1.5)
    """
    load_L = assigned_LE.max(-1).values / assigned_LE.mean(-1).clamp_min(1e-9)
    return load_L.mean().item(), load_L.max().item()
