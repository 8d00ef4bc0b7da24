"""The balance loss of a mixture whose experts every rank holds, over the tokens of all ranks.

Seen with transformers 5.17.0: models add `router_aux_loss_coef` times the loss of their own tokens, to which
`Trainer.compute_loss` does what it does to sums over tokens: it multiplies by the ranks, and counts one for each
micro-batch of a step. Label smoothing takes the labels away, and the balance loss with them.

Shape suffixes: T tokens of this rank, E experts of a layer, K experts that a token visits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ....ds_configs.specs.errors import Fault, UsageError
from .balance import RoutedTokens, balance_loss_share

if TYPE_CHECKING:
    from torch import Tensor

_SAME = 1e-4
"""Largest relative difference from the model's own loss of the same tokens, which bf16 routers leave."""


def balance_over_ranks(trainer: Any) -> None:
    """Let a Trainer add the balance loss of all ranks' tokens, the mean over the micro-batches of a step.

    Evaluations keep the model's own, of each batch. Call it once, right after the Trainer was made.
    """
    compute = trainer.compute_loss
    is_known: list[bool] = []
    trainer.corrects_balance_loss = True

    def compute_loss(
        model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **keywords: Any
    ) -> Any:
        if not model.training:
            return compute(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch, **keywords)
        mask = inputs.get("attention_mask")
        mask_T = mask.reshape(-1).float() if mask is not None and mask.dim() == 2 else None
        with _own_balance_loss_off(trainer.model) as strength:
            loss, outputs = compute(model, inputs, True, num_items_in_batch=num_items_in_batch, **keywords)
        layers = _routed(outputs, trainer.model)
        if not is_known:
            _check_formula(layers, mask_T, outputs, trainer.model)
            is_known.append(True)
        factor = strength * balance_factor(trainer, num_items_in_batch)
        loss = loss + factor * balance_loss_share(layers, mask_T, sum_over_ranks)
        return (loss, outputs) if return_outputs else loss

    trainer.compute_loss = compute_loss


def balance_factor(trainer: Any, num_items_in_batch: Any, *, training: bool = True) -> float:
    """Return by what to multiply this rank's share, so that a step adds the mean over its micro-batches.

    Engines average over the ranks, whose shares are to be added up; the Trainer divides by the micro-batches of a step
    itself, but for losses that are divided by the tokens of the step.
    """
    divided_later = trainer.compute_loss_func is None and (
        num_items_in_batch is None or not trainer.model_accepts_loss_kwargs
    )
    ranks = float(trainer.args.world_size)
    return ranks if divided_later or not training else ranks / trainer.current_gradient_accumulation_steps


def sum_over_ranks(tensor: Tensor) -> None:
    """Add a tensor up over all ranks, in place."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(tensor)


@contextmanager
def _own_balance_loss_off(model: Any) -> Iterator[float]:
    """Give the strength of the balance loss, of which the model adds none in the block though it says its routing."""
    strength = model.router_aux_loss_coef
    model.router_aux_loss_coef = 0.0
    try:
        yield float(strength)
    finally:
        model.router_aux_loss_coef = strength


def _routed(outputs: Any, model: Any) -> list[RoutedTokens]:
    import torch

    chosen = []
    for logits_TE in outputs.get("router_logits") or ():
        with torch.no_grad():
            selected_TK = torch.topk(torch.softmax(logits_TE, dim=-1), _experts_of_a_token(model), dim=-1).indices
        chosen.append(RoutedTokens(logits_TE=logits_TE, selected_TK=selected_TK, sent=logits_TE.new_zeros(())))
    return chosen


def _experts_of_a_token(model: Any) -> int:
    own = getattr(model, "num_experts_per_tok", None)
    return int(own or model.config.get_text_config().num_experts_per_tok)


def _check_formula(layers: list[RoutedTokens], mask_T: Any, outputs: Any, model: Any) -> None:
    """Refuse a family that balances its experts otherwise than Switch Transformer."""
    import torch

    own = outputs.get("aux_loss")
    if layers and torch.is_tensor(own):
        with torch.no_grad():
            found = balance_loss_share(layers, mask_T, lambda tensor: None)
        if abs(float(found) - float(own)) <= _SAME * abs(float(own)):
            return
    rule = "adds a balance loss that is not known here, and that would count as many times as there are ranks"
    raise UsageError(Fault(where="output_router_logits", value=type(model).__name__, rule=rule, fix="set it to false"))
