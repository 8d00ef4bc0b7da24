"""Balance loss of a mixture of experts over the tokens of all ranks, for any trainer that adds it.

Seen with transformers 5.17.0 and 5.23.0, trl 1.16.0: models compute the balance loss of a rank's own tokens with
`load_balancing_loss_func` of their module, and return it as `aux_loss`.

- With labels, a model adds `router_aux_loss_coef` times that loss to its own loss. `Trainer.compute_loss` then scales
  the sum like a sum over tokens: it multiplies by the number of ranks and adds one balance loss per micro-batch.
- Trainers of TRL, and `DistillationTrainer`, add `aux_loss` themselves, as a mean over micro-batches and ranks.
- Label smoothing removes the labels, and with them the balance loss. So do user losses that are computed from logits.

Here the function returns this rank's part of the balance loss of all ranks' tokens, multiplied by the number of ranks
and without samples that Accelerate repeats. Its mean over the ranks, which engines take, is the balance loss. A scaled
coefficient undoes what the Trainer does to the model's loss. What a trainer adds itself needs no correction, and a
balance loss that no one adds is added.

Shape suffixes: T tokens of this rank, E experts of a layer, K experts per token, L layers.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import takewhile
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ...ds_configs.specs.errors import ConfigError, UsageError
from ...plugins import patches
from ...plugins.accelerate import KeptPart
from ...plugins.transformers.output_heads import base_model
from ...plugins.transformers.training_arguments import own_class
from ..counting.counts import with_values
from ..exact import make_exact

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, Trainer

_SAME = 1e-4
"""Largest relative difference from the model's own loss of the same tokens; bf16 routers cause it."""
_FUNCTION = "load_balancing_loss_func"
_SHARED = "transformers.models.mixtral.modeling_mixtral"
"""Module in which trainers that compute the balance loss of any family look up the function."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutedTokens:
    """Choices of one layer's router for the tokens of this rank."""

    logits_TE: Tensor
    """Before softmax or sigmoid, with their graph."""
    selected_TK: Tensor
    """The experts of each token."""


def assigned_to(routed: RoutedTokens, mask_T: Tensor | None) -> Tensor:
    """Return the number of assignments of each expert [E] in fp32, without those of padding."""
    import torch

    count_E = torch.zeros(routed.logits_TE.shape[1], dtype=torch.float32, device=routed.logits_TE.device)
    weight = torch.ones_like(routed.selected_TK, dtype=torch.float32)
    if mask_T is not None:
        weight = weight * mask_T[:, None]
    return count_E.scatter_add_(0, routed.selected_TK.reshape(-1), weight.reshape(-1))


def balance_loss_share(
    layers: Sequence[RoutedTokens], mask_T: Tensor | None, sum_over_ranks: Callable[[Tensor], None]
) -> Tensor:
    """Return this rank's part of the balance loss of a micro-batch; the sum over all ranks is the loss.

    `E * sum_e f_e * P_e`, where `f_e` is the number of assignments of expert e per token and `P_e` the mean of its
    probability, both over the tokens of all layers and all ranks (Switch Transformer, arXiv 2101.03961, eq. 4-6, as in
    transformers/models/mixtral/modeling_mixtral.py `load_balancing_loss_func`; over ranks as in arXiv 2501.11873).
    `f` has no gradient, so the backward pass needs no communication.

    Args:
        mask_T: 1 for tokens and 0 for padding; `None` without padding.
        sum_over_ranks: Sums a tensor over the data-parallel ranks, in place.
    """
    import torch

    first = layers[0].logits_TE
    probability_E = first.new_zeros(first.shape[1], dtype=torch.float32)
    tokens_and_assigned = first.new_zeros(1 + first.shape[1], dtype=torch.float32)
    for routed in layers:
        layer_TE = torch.softmax(routed.logits_TE.float(), dim=-1)
        tokens = layer_TE.shape[0] if mask_T is None else mask_T.sum()
        probability_E = probability_E + (layer_TE if mask_T is None else layer_TE * mask_T[:, None]).sum(0)
        with torch.no_grad():
            tokens_and_assigned[0] += tokens
            tokens_and_assigned[1:] += assigned_to(routed, mask_T)
    sum_over_ranks(tokens_and_assigned)
    tokens, assigned_E = tokens_and_assigned[0], tokens_and_assigned[1:]
    return first.shape[1] * (assigned_E / tokens * probability_E / tokens).sum()


class BalanceOverRanks:
    """Computes the balance loss of one Trainer over all ranks, as the mean over the micro-batches of a step.

    Args:
        records: Returns the routing of the latest forward pass, if routers do not return it to the model. Without it,
            evaluation keeps the model's own balance loss of each batch.
    """

    def __init__(self, trainer: Trainer, records: Callable[[], Sequence[RoutedTokens]] | None = None) -> None:
        from transformers import Trainer as Stock

        self._trainer, self._records = trainer, records
        self._is_checked = False
        kind = own_class(trainer)
        above = takewhile(lambda base: base is not Stock, kind.__mro__)
        methods = [method for base in above for method in vars(base).values() if inspect.isfunction(method)]
        codes = [inspect.unwrap(method).__code__ for method in methods]
        reads = any("aux_loss" in (*code.co_names, *code.co_consts) for code in codes)
        self.is_added_by_trainer = getattr(kind, "adds_balance_loss", False) or reads
        self._latest: Any = None
        self._factor = 1.0
        self._kept: KeptPart | None = None

    def applies(self, model: Any) -> bool:
        """Return whether the loss of the next micro-batch has the balance loss of all ranks."""
        return self._records is not None or bool(model.training)

    @contextmanager
    def over_ranks(self, model: Any, num_items_in_batch: Any) -> Iterator[None]:
        """Replace the balance loss that models compute in the block by that of all ranks."""
        trainer = self._trainer
        inner, repeated = base_model(trainer.model), trainer.repeated_samples
        self._latest = self._kept = None
        if model.training and repeated is not None:
            self._kept = repeated.next_kept_part()
        self._factor = balance_factor(trainer, num_items_in_batch, training=model.training) / trainer.args.world_size
        trainer_multiplies = (
            trainer.args.average_tokens_across_devices
            and (trainer.model_accepts_loss_kwargs or trainer.compute_loss_func)
            and num_items_in_batch is not None
        )
        in_model = self._factor / (trainer.accelerator.num_processes if trainer_multiplies else 1)
        with ExitStack() as stack:
            for module in _modules(inner):
                stack.enter_context(patches.applied("counted-balance-loss", self._replacing, on=module))
            if getattr(inner, "router_aux_loss_coef", None) is not None:
                coefficient = inner.router_aux_loss_coef * in_model
                stack.enter_context(with_values(inner, router_aux_loss_coef=coefficient))
            yield

    def with_missing(self, loss: Any, outputs: Any) -> Any:
        """Return a loss with the balance loss, if neither the trainer nor the model has added it.

        A model that gets labels returns a loss, which includes the balance loss.
        """
        got_labels = (outputs.get("loss") if hasattr(outputs, "get") else None) is not None
        if self.is_added_by_trainer or self._latest is None or got_labels:
            return loss
        return loss + float(base_model(self._trainer.model).router_aux_loss_coef) * self._factor * self._latest

    def without_repeated(self, mask_T: Tensor | None, logits_TE: Tensor) -> Tensor | None:
        """Return the mask of a micro-batch's tokens without samples that Accelerate repeats; `None` for all tokens."""
        if self._kept is None:
            return mask_T
        kept_T = self._kept.mask(len(logits_TE), like=logits_TE.detach().float())
        return kept_T if mask_T is None else mask_T.to(kept_T.device) * kept_T

    def _replacing(self, own: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        def load_balancing_loss_func(
            gate_logits: Any, num_experts: Any = None, top_k: int = 2, attention_mask: Any = None, **further: Any
        ) -> Any:
            recorded = list(self._records()) if self._records is not None else []
            layers = [*recorded]
            for logits_TE in gate_logits if not recorded and isinstance(gate_logits, tuple) else ():
                with torch.no_grad():
                    selected_TK = torch.topk(torch.softmax(logits_TE, dim=-1), top_k, dim=-1).indices
                layers.append(RoutedTokens(logits_TE=logits_TE, selected_TK=selected_TK))
            if not layers:
                return own(gate_logits, num_experts, top_k, attention_mask, **further)
            mask_T = None if attention_mask is None else attention_mask.reshape(-1).float()
            if not self._is_checked and not recorded:
                expected = float(own(gate_logits, num_experts, top_k, attention_mask, **further))
                with torch.no_grad():
                    switch = float(balance_loss_share(layers, mask_T, lambda tensor: None))
                if not abs(switch - expected) <= _SAME * abs(expected):
                    raise _unknown_formula(self._trainer.model)
            self._is_checked = True
            mask_T = self.without_repeated(mask_T, layers[0].logits_TE)
            balance = balance_loss_share(layers, mask_T, sum_over_ranks) * float(self._trainer.args.world_size)
            # A frozen second model has no gradient in training.
            if balance.requires_grad or not self._trainer.model.training:
                self._latest = balance
            return balance

        return load_balancing_loss_func


def balance_over_ranks(trainer: Any) -> None:
    """Make a Trainer compute the balance loss over all ranks' tokens, if its model has one that is not corrected yet.

    Some trainers switch it on themselves.
    """
    inner = base_model(trainer.model)
    has_loss = getattr(inner, "router_aux_loss_coef", None) is not None and bool(_modules(inner))
    if has_loss and not getattr(trainer, "corrects_balance_loss", False):
        trainer.corrects_balance_loss = True
        make_exact(trainer).rank_balance = BalanceOverRanks(trainer)


def check_balance_loss(model: PreTrainedModel) -> None:
    """Reject a mixture of experts whose balance loss cannot be computed over all ranks.

    Raises:
        UsageError: the module of the model's class has no function that computes it.
    """
    if not _modules(base_model(model)):
        raise _unknown_formula(model)


def balance_factor(trainer: Trainer, num_items_in_batch: Any, *, training: bool = True) -> float:
    """Return the factor of this rank's part of the balance loss that makes a step add the mean over its micro-batches.

    Engines average over the ranks, whose parts must be summed. The Trainer divides by the micro-batches of a step
    itself, except for losses that are divided by the tokens of the step.
    """
    from transformers import Trainer

    # As `Trainer.training_step` decides, which reads the attribute from Transformers 5.19 on.
    scaled = trainer.loss_is_scaled_for_ga if hasattr(Trainer, "loss_is_scaled_for_ga") else None
    if scaled is None:
        scaled = trainer.compute_loss_func is not None or (
            num_items_in_batch is not None and trainer.model_accepts_loss_kwargs
        )
    ranks = float(trainer.args.world_size)
    return ranks / trainer.current_gradient_accumulation_steps if scaled and training else ranks


def sum_over_ranks(tensor: Tensor) -> None:
    """Sum a tensor over all ranks, in place."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(tensor)


def _modules(model: PreTrainedModel) -> list[ModuleType]:
    """Return the modules in which models and trainers look the function up; FSDP2 makes the class a subclass."""
    present = (sys.modules.get(kind.__module__) for kind in type(model).__mro__)
    own = [module for module in present if module is not None and hasattr(module, _FUNCTION)]
    shared = [sys.modules[_SHARED]] if own and _SHARED in sys.modules else []
    return list(dict.fromkeys([*own, *shared]))


def _unknown_formula(model: Any) -> UsageError:
    rule = "adds a balance loss with an unknown formula, which would count once per rank"
    return UsageError(
        ConfigError(where="output_router_logits", value=type(model).__name__, rule=rule, fix="set it to false")
    )
