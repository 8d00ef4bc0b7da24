"""Optimizers that need more than a name in `TrainingArguments.optim`: Muon, those on DTensors, and those of scripts.

Observed with transformers 5.17.0 to 5.24.0 and torch 2.13.0: no name of `optim` is Muon. `Adafactor` creates its rows
and columns as plain tensors, which PyTorch does not mix with DTensors. Adagrad's states and SGD without any fail to be
saved or restored under FSDP2. States of GaLore and APOLLO contain an object of their package, which
`torch.load(weights_only=True)` rejects when a run resumes.

A script's own optimizer and scheduler: `deepspeed_init` silently replaces `Trainer(optimizers=...)` by an optimizer of
`args.optim`, and the Trainer rejects the argument under FSDP2. But both engines train any optimizer that the Trainer
creates later: they replace the parameters in its groups by flat pieces (DeepSpeed) or DTensors (FSDP2). So the script's
optimizer is inserted where the Trainer would create its own. Whether an optimizer computes the same steps on such
tensors is tested on small tensors of both kinds, instead of being inferred from its name.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DummyOptim

from ...ds_configs.specs.errors import ConfigError, UsageError
from ...ds_configs.specs.optimizers import OPTIMIZERS, PREPARED_UNDER_FSDP2, parsed_optim_args
from .. import patches
from ..launching.messages import note_on_first_rank
from .training_arguments import deepspeed_configuration

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim.lr_scheduler import LRScheduler
    from transformers import PreTrainedModel, Trainer, TrainingArguments

_STATE_CLASSES = {
    "galore-torch": (("galore_torch.galore_projector", "GaLoreProjector"),),
    "apollo-torch": (
        ("apollo_torch.random_projector", "GradientProjector"),
        ("apollo_torch.svd_projector", "GaLoreProjector"),
    ),
}
"""Classes in the states of optimizers, by package."""
_ROWS, _COLUMNS, _STEPS = 8, 6, 3
_SPLIT = 20
"""Index at which the small matrix is split into flat pieces: within a row."""
_LEARNING_RATE = 1e-2
_SAME = 1e-6
_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def prepare_optimizer(trainer: Trainer) -> None:
    """Let a Trainer create and resume the optimizer that its arguments name, under the engine of its arguments."""
    arguments = trainer.args
    name = str(getattr(arguments.optim, "value", arguments.optim))
    if name not in OPTIMIZERS or trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None:
        return
    for module, kind in _STATE_CLASSES.get(OPTIMIZERS[name].package, ()):
        torch.serialization.add_safe_globals([getattr(import_module(module), kind)])
    if name == "muon" and trainer.is_deepspeed_enabled:

        def with_decay_groups(prepare: Callable[..., Any]) -> Callable[..., Any]:
            def prepare_groups(*parts: Any, **keywords: Any) -> Any:
                decayed = set(trainer.get_decay_parameter_names(trainer.model))
                trained = [(name, weight) for name, weight in trainer.model.named_parameters() if weight.requires_grad]
                for optimizer in (part for part in parts if isinstance(part, DummyOptim)):
                    optimizer.params = [
                        {"params": [weight for name, weight in trained if name in decayed]},
                        {"params": [weight for name, weight in trained if name not in decayed], "weight_decay": 0.0},
                    ]
                return prepare(*parts, **keywords)

            return prepare_groups

        patches.apply("muon-decay-groups", with_decay_groups, on=trainer.accelerator)
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


def replaces_optimizers(columns: Iterable[str]) -> bool:
    """Return whether a layout replaces an optimizer's parameters by other tensors.

    >>> replaces_optimizers(["ddp"]), replaces_optimizers(["zero1", "tp"])
    (False, True)
    """
    return bool({*columns} - {"ddp", "single"})


def optimizer_errors(
    optimizer: torch.optim.Optimizer, scheduler: LRScheduler, arguments: TrainingArguments, columns: Sequence[str]
) -> list[ConfigError]:
    """Return why a script's optimizer and scheduler would not train as in one process; called on every rank.

    Args:
        optimizer: `None` if the script only creates a scheduler.
        scheduler: `None` for the Trainer's own.
        arguments: The Trainer's.
        columns: Columns of the run's layout in the table of combinations.
    """
    where = "optimizers"
    if optimizer is None:
        rule = "has a scheduler without its optimizer, so the Trainer's optimizer would ignore its learning rate"
        return [ConfigError(where=where, rule=rule, fix="pass both, or set lr_scheduler_type")]
    driven = getattr(scheduler, "optimizer", optimizer)
    errors = []
    if driven is not optimizer and getattr(driven, "optimizer", None) is not optimizer:
        rule, fix = "has a scheduler of another optimizer", "create the scheduler with the optimizer that you pass"
        errors.append(ConfigError(where=where, value=type(scheduler).__name__, rule=rule, fix=fix))
    if not replaces_optimizers(columns):
        return errors
    sections = ("optimizer",) if scheduler is None else ("optimizer", "scheduler")
    return errors + _engine_errors(optimizer, arguments, columns, where, sections)


def optimizer_class_errors(
    named: tuple[Any, Mapping[str, Any]], arguments: TrainingArguments, columns: Sequence[str]
) -> list[ConfigError]:
    """Return why `optimizer_cls_and_kwargs` would not train as in one process; called on every rank."""
    kind, keywords = named
    where = "optimizer_cls_and_kwargs"
    if not replaces_optimizers(columns):
        return []
    parameter = torch.nn.Parameter(torch.zeros(_ROWS, _COLUMNS, device=arguments.device))
    own = {name: value for name, value in keywords.items() if name not in ("params", "model", "optimizer_dict")}
    name = str(getattr(kind, "__name__", type(kind).__name__))
    try:
        optimizer = kind([parameter], **own)
    except Exception as error:
        rule = f"cannot be tested on a small matrix before training starts: {type(error).__name__}: {error}"
        return [ConfigError(where=where, value=name, rule=rule, fix="pass an optimizer class, or train with DDP")]
    return _engine_errors(optimizer, arguments, columns, where)


def model_errors(optimizer: torch.optim.Optimizer, model: PreTrainedModel, columns: Sequence[str]) -> list[ConfigError]:
    """Return why the groups of a script's optimizer do not match the parameters of the model."""
    trained = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    name = type(optimizer).__name__
    fix = "create it with the parameters of the model that you pass, after the model has its final layers"
    if not held & trained.keys():
        rule = "has no trainable parameter of the model"
        return [ConfigError(where="optimizers", value=name, rule=rule, fix=fix)]
    if not replaces_optimizers(columns):
        return []
    errors = []
    if strange := held - {id(parameter) for parameter in model.parameters()}:
        rule = f"has {len(strange)} parameters that are not the model's, which the engine would not shard"
        errors.append(ConfigError(where="optimizers", value=name, rule=rule, fix=fix))
    missing = [trained[identity] for identity in trained if identity not in held]
    if missing and any(column.startswith("zero") for column in columns):
        rule = f"lacks {missing[0]}, whose gradients DeepSpeed would neither clip nor clear"
        fix = "set requires_grad_(False) on parameters that are not trained"
        errors.append(ConfigError(where="optimizers", value=name, rule=rule, fix=fix))
    return errors


def note_hidden_shapes(optimizer: torch.optim.Optimizer) -> None:
    """Warn that groups cannot depend on the shapes of parameters that ZeRO-3 partitioned during loading."""
    if any(hasattr(parameter, "ds_shape") for group in optimizer.param_groups for parameter in group["params"]):
        note_on_first_rank(
            "optimizers: ZeRO-3 has partitioned the parameters, so parameter.ndim is 1 for all of them. If the "
            "optimizer's groups depend on it, use len(parameter.ds_shape) or names"
        )


class OwnOptimizer:
    """A script's optimizer and scheduler, for a Trainer that would create its own."""

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None) -> None:
        self.scheduler = scheduler
        self._optimizer = optimizer
        self._parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}

    def for_engine(self) -> Any:
        """Return the optimizer as an engine trains it.

        Raises:
            UsageError: an earlier training run has replaced its parameters.
        """
        weights = (weight for group in self._optimizer.param_groups for weight in group["params"])
        if any(id(weight) not in self._parameters for weight in weights):
            rule, fix = "was used by an earlier training run", "create a new optimizer and a new Trainer"
            name = type(self._optimizer).__name__
            raise UsageError(ConfigError(where="optimizers", value=name, rule=rule, fix=fix))
        # A separate list of the same groups, without groups in which nothing trains. Engines drop and add groups, but a
        # scheduler keeps one learning rate for each group that it was created with. The group objects are shared, so
        # the engine's optimizer uses the values that the scheduler sets.
        optimizer = self._optimizer
        engines: Any = object.__new__(type(optimizer))
        # A scheduler replaces `step` by a function that steps the original, and checks whether it has stepped.
        vars(engines).update({name: value for name, value in vars(optimizer).items() if name != "step"})
        for name in _HOOKS:
            setattr(engines, name, OrderedDict(getattr(optimizer, name)))
        trains = [any(weight.requires_grad for weight in group["params"]) for group in optimizer.param_groups]
        kept = [index for index, any_trains in enumerate(trains) if any_trains]
        engines.param_groups = [optimizer.param_groups[index] for index in kept]

        def note_step(*_: object) -> None:
            optimizer._opt_called = True

        def share_groups(loaded: Any) -> None:
            # Loading states creates new groups; Accelerate also does this when it wraps an optimizer.
            for index, group in zip(kept, loaded.param_groups, strict=False):
                optimizer.param_groups[index] = group

        engines.register_step_post_hook(note_step)
        engines.register_load_state_dict_post_hook(share_groups)
        return engines


def _engine_errors(
    optimizer: torch.optim.Optimizer,
    arguments: TrainingArguments,
    columns: Sequence[str],
    where: str,
    sections: Sequence[str] = ("optimizer",),
) -> list[ConfigError]:
    """Return errors if an engine would not use an optimizer, or steps its tensors differently from whole matrices."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    name = type(optimizer).__name__
    configuration = deepspeed_configuration(arguments) or {}
    rule = "conflicts with the {} of the DeepSpeed configuration, which DeepSpeed would use instead"
    errors = [
        ConfigError(where=where, rule=rule.format(section), fix=f"remove the section {section!r}, or omit {where}")
        for section in sections
        if section in configuration
    ]
    if any(optimizer.state.values()):
        rule = "already has states before the engine replaces the parameters that they belong to"
        fix = "pass an optimizer that has not stepped and creates its states in its first step"
        errors.append(ConfigError(where=where, value=name, rule=rule, fix=fix))
    if errors:
        return errors
    offload = (configuration.get("zero_optimization") or {}).get("offload_optimizer") or {}
    device = offload.get("device", "none")
    if getattr(device, "value", device) != "none" and configuration.get("zero_force_ds_cpu_optimizer", True):
        # Accelerate replaces it by DeepSpeed's CPU Adam and keeps the groups with their settings
        # (accelerate/utils/deepspeed.py, `map_pytorch_optim_to_deepspeed`).
        plain = not any(group.get(key) for group in optimizer.param_groups for key in ("amsgrad", "maximize"))
        if type(optimizer) is not torch.optim.AdamW or not plain:
            rule = "would be replaced by DeepSpeed's CPU Adam, because the optimizer is offloaded"
            fix = "use torch.optim.AdamW, or set zero_force_ds_cpu_optimizer: false in the DeepSpeed configuration"
            return [ConfigError(where=where, value=name, rule=rule, fix=fix)]

    def split(matrix: Tensor) -> Parts:
        if not shards_rows:
            flat = matrix.flatten()
            return [flat[:_SPLIT].clone(), flat[_SPLIT:].clone()], lambda parts: torch.cat(parts).reshape(matrix.shape)
        mesh = init_device_mesh(matrix.device.type, (distributed.get_world_size(),))
        return [distribute_tensor(matrix.clone(), mesh, [Shard(0)])], lambda parts: parts[0].full_tensor()

    shards_rows = bool({"fsdp2", "cp"} & set(columns))
    kind = "DTensors, which FSDP2 trains" if shards_rows else "flat pieces of matrices, which DeepSpeed trains"
    try:
        expected = _stepped(optimizer, lambda matrix: ([matrix.clone()], lambda parts: parts[0]), arguments.device)
    except Exception as error:
        rule = f"cannot step plain matrices: {type(error).__name__}: {error}"
        return [ConfigError(where=where, value=name, rule=rule, fix="use an optimizer whose step() takes no arguments")]
    fix = "use optim, another optimizer (such as torch.optim.AdamW), or DDP"
    try:
        stepped = _stepped(optimizer, split, arguments.device)
    except Exception as error:
        rule = f"cannot step {kind}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return [ConfigError(where=where, value=name, rule=rule, fix=fix)]
    if all(float((own - whole).abs().max()) <= _SAME for own, whole in zip(stepped, expected, strict=True)):
        return []
    rule = f"computes different steps on {kind}, because its arithmetic reads the shape of matrices"
    return [ConfigError(where=where, value=name, rule=rule, fix=fix)]


if TYPE_CHECKING:
    Parts = tuple[list[Tensor], Callable[[list[Tensor]], Tensor]]
    """Tensors that represent a matrix, and a function that joins them again."""


def _stepped(optimizer: torch.optim.Optimizer, split: Callable[[Tensor], Parts], device: torch.device) -> list[Tensor]:
    """Return a small matrix for each group of an optimizer, after a copy of it has stepped the matrix's parts."""
    generator = torch.Generator().manual_seed(0)

    def drawn() -> Tensor:
        return torch.randn(_ROWS, _COLUMNS, generator=generator).to(device)

    # The copy has an empty tensor for each of the model's parameters.
    copy = object.__new__(type(optimizer))
    memo: dict[int, object] = {id(optimizer): copy}
    for group in optimizer.param_groups:
        memo |= {id(weight): torch.nn.Parameter(torch.zeros(1)) for weight in group["params"]}
    # A scheduler replaces `step` by a function that steps the original.
    attributes = {name: value for name, value in vars(optimizer).items() if name != "step"}
    attributes |= {name: OrderedDict() for name in _HOOKS if name in attributes}
    vars(copy).update(deepcopy(attributes, memo))
    joins = []
    for group in copy.param_groups:
        parts, join = split(drawn())
        group["params"] = [torch.nn.Parameter(part) for part in parts]
        joins.append(join)
        if "lr" in group:
            # A warm-up begins with 0, which would hide every difference.
            group["lr"] = torch.tensor(_LEARNING_RATE) if torch.is_tensor(group["lr"]) else _LEARNING_RATE
    for _ in range(_STEPS):
        for group in copy.param_groups:
            for parameter, part in zip(group["params"], split(drawn())[0], strict=True):
                parameter.grad = part
        copy.step()
    groups = zip(copy.param_groups, joins, strict=True)
    return [join([weight.detach() for weight in group["params"]]) for group, join in groups]
