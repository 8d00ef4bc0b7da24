"""Optimizers that need more than a name in `TrainingArguments.optim`: Muon, and optimizers on FSDP2's DTensors.

Observed with transformers 5.17.0 to 5.24.0 and torch 2.13.0: no name of `optim` is Muon. `Adafactor` creates its rows
and columns as plain tensors, which PyTorch does not mix with DTensors. Adagrad's states and SGD without any fail to be
saved or restored under FSDP2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DummyOptim

from ...ds_configs.specs.optimizers import OPTIMIZERS, PREPARED_UNDER_FSDP2, parsed_optim_args
from .. import patches

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer


def prepare_optimizer(trainer: Trainer) -> None:
    """Let a Trainer create and resume the optimizer that its arguments name, under the engine of its arguments."""
    arguments = trainer.args
    name = str(getattr(arguments.optim, "value", arguments.optim))
    if name not in OPTIMIZERS or trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None:
        return
    if name == "muon" and trainer.is_deepspeed_enabled:
        patches.apply("muon-decay-groups", partial(_with_decay_groups, trainer), on=trainer.accelerator)
    elif name == "muon":
        stated = parsed_optim_args(arguments.optim_args or "")
        settings = {
            "decays": trainer.get_decay_parameter_names,
            "muon": {
                "lr": float(stated.get("muon_lr", arguments.learning_rate)),
                "momentum": float(stated.get("momentum", 0.95)),
                "ns_steps": int(stated.get("ns_steps", 5)),
                "weight_decay": arguments.weight_decay,
            },
            "adamw": {
                "lr": arguments.learning_rate,
                "betas": (arguments.adam_beta1, arguments.adam_beta2),
                "eps": arguments.adam_epsilon,
            },
        }
        trainer.optimizer_cls_and_kwargs = (_MuonFactory, settings)
    if name in PREPARED_UNDER_FSDP2 and trainer.is_fsdp_enabled:
        kind, keywords = trainer.get_optimizer_cls_and_kwargs(arguments, trainer.model)
        trainer.optimizer_cls_and_kwargs = (_resumable(kind), keywords)
    if OPTIMIZERS[name].factored and trainer.is_fsdp_enabled:
        from transformers.optimization import Adafactor

        plain = {"lr": arguments.learning_rate, "scale_parameter": False, "relative_step": False}
        trainer.optimizer_cls_and_kwargs = (_sharded_adafactor(Adafactor), plain)


def _resumable(kind: Any) -> Any:
    class Resumable(kind):
        """An optimizer that resumes under FSDP2.

        FSDP2 replaces the parameters after the optimizer is created, so that states must not exist yet, and PyTorch
        fails to restore an optimizer without any (torch 2.13, `_load_optim_state_dict`: "Expected device to be set").
        """

        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **keywords)
            self.state.clear()

        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            for parameter in (weight for group in self.param_groups for weight in group["params"]):
                if parameter.grad is not None and not self.state[parameter]:
                    self.state[parameter]["stepped"] = torch.ones(1)
            return result

    return Resumable


def _with_decay_groups(trainer: Trainer, prepare: Callable[..., Any]) -> Callable[..., Any]:
    def prepare_groups(*parts: Any, **keywords: Any) -> Any:
        decayed = set(trainer.get_decay_parameter_names(trainer.model))
        named = [(name in decayed, weight) for name, weight in trainer.model.named_parameters() if weight.requires_grad]
        for optimizer in (part for part in parts if isinstance(part, DummyOptim)):
            optimizer.params = [
                {"params": [weight for is_decayed, weight in named if is_decayed]},
                {"params": [weight for is_decayed, weight in named if not is_decayed], "weight_decay": 0.0},
            ]
        return prepare(*parts, **keywords)

    return prepare_groups


def _sharded_adafactor(kind: Any) -> Any:
    class ShardedAdafactor(kind):
        """Adafactor whose first states are DTensors, if the parameters are."""

        def step(self, closure: Any = None) -> Any:
            from torch.distributed.tensor import DTensor, Partial, Replicate

            for group in self.param_groups:
                for parameter in group["params"]:
                    gradient = parameter.grad
                    if not isinstance(gradient, DTensor) or self.state[parameter]:
                        continue

                    def zeros_of(mean: DTensor) -> DTensor:
                        kept = [Replicate() if isinstance(p, Partial) else p for p in mean.placements]
                        return torch.zeros_like(mean.redistribute(placements=kept), dtype=torch.float32)

                    state = self.state[parameter]
                    state |= {"step": 0, "RMS": 0}
                    if gradient.ndim > 1:
                        state["exp_avg_sq_row"] = zeros_of(gradient.mean(dim=-1))
                        state["exp_avg_sq_col"] = zeros_of(gradient.mean(dim=-2))
                    else:
                        state["exp_avg_sq"] = torch.zeros_like(gradient, dtype=torch.float32)
            return super().step(closure)

    return ShardedAdafactor


class _MuonFactory:
    """Creates the optimizer when the Trainer needs it, with the names of the model's parameters."""

    def __call__(self, model: PreTrainedModel, *, decays: Any, muon: dict[str, Any], adamw: dict[str, Any]) -> Any:
        decayed = set(decays(model))
        groups: dict[tuple[bool, bool], list[torch.nn.Parameter]] = {}
        for name, weight in model.named_parameters():
            if weight.requires_grad:
                is_matrix = weight.ndim == 2 and not any(part in name.lower() for part in ("embed", "lm_head"))
                groups.setdefault((is_matrix, name in decayed), []).append(weight)
        weight_decay = muon.pop("weight_decay")
        return MuonWithAdamW(
            {
                "params": weights,
                "use_muon": is_matrix,
                "weight_decay": weight_decay if is_decayed else 0.0,
                **(muon if is_matrix else adamw),
            }
            for (is_matrix, is_decayed), weights in groups.items()
        )


class MuonWithAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` for groups with `use_muon`, AdamW for the others, as DeepSpeed's Muon divides them."""

    def __init__(self, groups: Iterable[dict[str, Any]]) -> None:
        super().__init__(list(groups), {})
        kinds = {True: torch.optim.Muon, False: torch.optim.AdamW}
        # They share the groups, to which their constructors add missing defaults.
        self._parts = {used: kinds[used](own) for used in kinds if (own := self._groups_with(used))}

    def _groups_with(self, use_muon: bool) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["use_muon"] is use_muon]

    def step(self, closure: Any = None) -> None:
        """Step both parts, whose groups an engine or a resumed run may have replaced."""
        assert closure is None, "the Trainer passes none"
        for used, optimizer in self._parts.items():
            optimizer.state, optimizer.param_groups = self.state, self._groups_with(used)
            optimizer.step()
