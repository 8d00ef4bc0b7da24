"""Prepare a Trainer's model once, and let ranks train whose rows use different parameters.

With transformers 5.17.0 and 5.23.0, and accelerate 1.15.0:

- `evaluate` and `predict` before `train` prepare the model without its optimizer. DDP then trains without reducing
  gradients, ZeRO-1, ZeRO-2 and FSDP2 fail, and ZeRO-3 trains with an engine that has no optimizer.
- A second `train` destroys the DeepSpeed engine that it trains with.
- Engines keep the gradients of a step that an exception interrupted.
- CPU Adam cannot step with the settings of a checkpoint that an optimizer on the accelerator saved.

A row may decide which modules run: output heads of tasks, adapters, the vision tower of rows with an image. A rank
whose rows do not use a parameter takes part in the engine's collectives and contributes zeros. With deepspeed 0.19.8
and torch 2.13.0:

- ZeRO fills buckets in the order in which gradients arrive. Ranks that miss a gradient, or have them in another order,
  add gradients of different parameters. Here every rank reduces all parameters in one order (`GradientOrder`).
- ZeRO-3 and FSDP2 gather the parameters of a module when it runs. Ranks that run different modules gather different
  parameters. Here a rank also runs the modules that only other ranks run, with their inputs (`EqualForwards`).
- DDP does the same with `find_unused_parameters`, which Transformers does not set under gradient checkpointing.

Nothing of this runs for models that use every parameter in each pass: `modules_with_choice` returns none.
`exact.ExactTrainer` calls what is here.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from ...ds_configs.specs.errors import ConfigError, UsageError
from .. import patches
from .gradient_checkpointing import in_backward_pass

if TYPE_CHECKING:
    from torch import Tensor

_SCHEDULE_LENGTHS = ("total_num_steps", "warmup_num_steps")
"""Parameters of a scheduler of DeepSpeed that Transformers computes from the number of steps if they are `auto`."""


def prepare_before_training(trainer: Any, dataloader: Any) -> None:
    """Prepare model and optimizer for an evaluation that may be followed by training, unless they are prepared."""
    from accelerate.utils import DistributedType

    is_distributed = trainer.accelerator.distributed_type != DistributedType.NO
    trains = any(weight.requires_grad for weight in trainer.model.parameters())
    if is_distributed and trains and not is_prepared(trainer):
        scheduler = trainer.lr_scheduler
        trainer._prepare_for_training(max(trainer.args.max_steps, 1), dataloader, None)
        # Training creates the scheduler for its number of steps.
        trainer.lr_scheduler = trainer.callback_handler.lr_scheduler = scheduler
        trainer._created_lr_scheduler = False


def is_prepared(trainer: Any) -> bool:
    """Return whether the model of a Trainer is wrapped or sharded by its engine."""
    from torch.distributed.fsdp import FSDPModule

    # FSDP2 changes the class of a model instead of wrapping it.
    return trainer.model_wrapped is not trainer.model or any(
        isinstance(module, FSDPModule) for module in trainer.model.modules()
    )


@contextmanager
def engine_kept(trainer: Any, batch_size: int | None) -> Iterator[None]:
    """Keep the engine and the optimizer of a prepared Trainer while a later training run starts in the block.

    `auto_find_batch_size` prepares the model again for each batch size that it tries.
    """
    accelerator = trainer.accelerator
    if not is_prepared(trainer) or batch_size != trainer._train_batch_size:
        yield
        return
    kept: dict[str, Any] = {"_models": [trainer.model_wrapped], "_optimizers": [trainer.optimizer]}
    if trainer.is_deepspeed_enabled:
        kept["deepspeed_engine_wrapped"] = accelerator.deepspeed_engine_wrapped

    def keeping(free: Callable[..., Any]) -> Callable[..., Any]:
        def free_memory(*objects: Any) -> Any:
            accelerator.deepspeed_engine_wrapped = None
            freed = free(*objects)
            vars(accelerator).update(kept)
            return freed

        return free_memory

    trainer.keeps_engine = True
    try:
        with patches.applied("kept-through-free-memory", keeping, on=accelerator):
            yield
    finally:
        trainer.keeps_engine = False


@contextmanager
def first_preparation(trainer: Any, resume_from_checkpoint: str | None) -> Iterator[None]:
    """Complete what `_prepare_for_training` does in the block for the first time."""
    lengths = _schedule(trainer)
    trainer._automatic_lengths = [name for name in _SCHEDULE_LENGTHS if lengths.get(name) == "auto"]
    # Before the engine changes the classes of modules.
    choosing = modules_with_choice(trainer.model)
    if choosing:
        find_unused_parameters(trainer)
    yield
    if choosing:
        accept_unused_parameters(trainer, choosing)
    if trainer.is_deepspeed_enabled:
        require_gradients_of_leaf_inputs(trainer.model)
    if resume_from_checkpoint is not None and trainer.is_deepspeed_enabled:
        # DeepSpeed 0.19.8 has replaced the groups by those of the checkpoint, whose optimizer may have had fewer
        # settings: CPU Adam fails with the groups of torch's AdamW.
        optimizer = trainer.model_wrapped.basic_optimizer
        for group in optimizer.param_groups if optimizer is not None else ():
            for name, value in optimizer.defaults.items():
                group.setdefault(name, value)


@contextmanager
def later_preparation(trainer: Any, resume_from_checkpoint: str | None) -> Iterator[None]:
    """Make `_prepare_for_training` keep model and optimizer in the block, and create a new schedule.

    Raises:
        UsageError: the run resumes from a checkpoint under expert parallelism.
    """
    from torch.distributed.fsdp import FSDPModule

    if resume_from_checkpoint is not None and getattr(trainer.model_wrapped, "has_moe_layers", False):
        # Measured: the loss of the next step differs by 0.06 from one process.
        rule = "is not supported after an evaluation or a training run under expert parallelism"
        fix = "create a new Trainer and call train(resume_from_checkpoint=...) first"
        raise UsageError(ConfigError(where="resume_from_checkpoint", rule=rule, fix=fix))
    # What an interrupted step has accumulated inside an engine; the Trainer clears `weight.grad`.
    if trainer.is_deepspeed_enabled:
        optimizer = trainer.model_wrapped.optimizer
        # As the optimizers of ZeRO-1 and ZeRO-2 do after an overflow.
        for clear in ("zero_grad", "clear_hp_grads", "_release_preflattened_grad_buffers", "reset_cpu_buffers"):
            getattr(optimizer, clear, lambda: None)()
        if hasattr(optimizer, "all_grad_tensors"):
            from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID

            optimizer.micro_step_id = INITIAL_MICRO_STEP_ID
            optimizer.averaged_gradients, optimizer.all_grad_tensors = {}, {}
    for module in trainer.model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            for group in filter(None, getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]):
                for parameter in group.fsdp_params:
                    parameter.unsharded_accumulated_grad = None
                    if hasattr(parameter, "_unsharded_param"):
                        parameter._unsharded_param.grad = None
    before, trainer.keeps_engine = trainer.keeps_engine, True
    try:
        with (
            patches.applied(
                "prepared-model", lambda _: lambda *own: own if len(own) > 1 else own[0], on=trainer.accelerator
            ),
            patches.applied("renewed-schedule", lambda _: _renew_schedule),
        ):
            yield
    finally:
        trainer.keeps_engine = before


def _schedule(trainer: Any) -> dict[str, Any]:
    """Return the parameters of the scheduler in a Trainer's DeepSpeed configuration; empty without one."""
    if not trainer.is_deepspeed_enabled:
        return {}
    config = trainer.accelerator.state.deepspeed_plugin.hf_ds_config.config
    parameters: dict[str, Any] = config.get("scheduler", {}).get("params", {})
    return parameters


def _renew_schedule(trainer: Any, num_training_steps: int, inference: bool = False) -> tuple[Any, Any]:
    """Return the optimizer that an engine has, and a new scheduler if the engine steps it."""
    from accelerate.utils import DeepSpeedSchedulerWrapper

    engine, optimizer = trainer.model_wrapped, trainer.optimizer
    if engine.lr_scheduler is None:
        return optimizer, trainer.lr_scheduler
    lengths, config = _schedule(trainer), trainer.accelerator.state.deepspeed_plugin.hf_ds_config
    lengths.update(dict.fromkeys(trainer._automatic_lengths, "auto"))
    config.trainer_config_finalize(trainer.args, trainer.model, num_training_steps)
    if "scheduler" in config.config:
        engine._config.scheduler_params = lengths
        engine._configure_lr_scheduler()
    else:
        trainer.lr_scheduler = None
        engine.lr_scheduler = trainer.create_scheduler(num_training_steps, optimizer=engine.basic_optimizer)
        trainer._created_lr_scheduler = False
    return optimizer, DeepSpeedSchedulerWrapper(engine.lr_scheduler, optimizer)


_LIBRARIES = {
    *("accelerate", "bitsandbytes", "deepspeed", "liger_kernel", "peft", "shardwright"),
    *("torch", "torchao", "transformers", "trl"),
}
_ALWAYS_RUN = {"text_config", "encoder", "decoder"}
"""Parts of a configuration whose modules every row uses; others are towers for images and sound."""
_MOST_NAMES = 4


def modules_with_choice(model: Any) -> set[Any]:
    """Return the modules that may run other parts of themselves for each row, and the modules around them.

    Text models of Transformers run all of their parts. Modules of other packages, towers for images and sound, several
    adapters, and layers that are dropped at random may not.
    """
    found = set()

    def visit(module: Any) -> bool:
        config = getattr(module, "config", None)
        inside = list(map(visit, module.children()))
        chooses = (
            any(inside)
            or _is_selection(module)
            or type(module).__module__.partition(".")[0] not in _LIBRARIES
            or not _ALWAYS_RUN.issuperset(getattr(config, "sub_configs", ()))
            or any(getattr(config, f"{name}layerdrop", 0) for name in ("", "encoder_", "decoder_"))
        )
        if chooses:
            found.add(module)
        return chooses

    visit(model)
    return found


def find_unused_parameters(trainer: Any) -> None:
    """Let DDP find unused parameters, unless the user decided or recomputes layers as DDP cannot follow."""
    if trainer.args.ddp_find_unused_parameters is None and not _is_reentrant(trainer.args):
        handler = getattr(trainer.accelerator, "ddp_handler", None)
        if handler is not None:
            handler.find_unused_parameters = True


def _is_reentrant(args: Any) -> bool:
    """Return whether recomputed layers run without gradients in the forward pass."""
    return bool(args.gradient_checkpointing and (args.gradient_checkpointing_kwargs or {}).get("use_reentrant"))


def require_gradients_of_leaf_inputs(model: Any) -> None:
    """Make the embeddings' output require gradients if the first parameters that train are in a leaf module of ZeRO-3.

    An example are adapters of experts alone. DeepSpeed 0.19.8 reduces the gradients of a leaf module when that of its
    input exists (stage3.py:1538). Without one it reduces zeros before the gradients are computed.
    """
    from deepspeed.utils import z3_leaf_module

    first = next((parameter for parameter in model.parameters() if parameter.requires_grad), None)
    leaves = [module for module in model.modules() if z3_leaf_module(module)]
    if any(parameter is first for module in leaves for parameter in module.parameters()):
        model.enable_input_require_grads()


def accept_unused_parameters(trainer: Any, choosing: set[Any]) -> None:
    """Make the engine of a prepared Trainer accept ranks whose rows use different parameters.

    `choosing` is what `modules_with_choice` returned before the engine changed the classes of modules.
    """
    import torch.distributed as distributed
    from torch.distributed.fsdp import FSDPModule

    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return
    model, args = trainer.model, trainer.args
    if trainer.is_deepspeed_enabled:
        import deepspeed
        from deepspeed.utils import z3_leaf_module

        engine = trainer.model_wrapped
        zero: Any = getattr(engine, "optimizer", None)
        if not hasattr(zero, "reduce_ready_partitions_and_remove_grads") or engine.pipeline_parallelism or zero.zenflow:
            return
        if distributed.get_world_size(zero.dp_process_group) > 1:
            GradientOrder(zero)
        offload = getattr(zero, "parameter_offload", None)
        if offload is not None and not args.torch_compile:
            # A parameter is gathered when it is read: ranks that read others, such as those of the active adapter of
            # PEFT, would mix their weights.
            for module in choosing:
                for child in filter(_is_selection, module.children()):
                    for parameter in child.parameters():
                        deepspeed.zero.register_external_parameter(module, parameter)
            # ZeRO-3 traces modules without parameters too. It gathers those of leaf modules together, and generation
            # removes its hooks.
            choosing = {module for module in choosing if not z3_leaf_module(module)}
            EqualForwards(model, set(model.modules()), choosing, args, lambda: bool(offload.forward_hooks))
    elif any(isinstance(module, FSDPModule) for module in model.modules()):
        model.set_reduce_scatter_unused_params(True)
        if not args.torch_compile:
            gathering = {each for each in model.modules() if any(isinstance(m, FSDPModule) for m in each.modules())}
            EqualForwards(model, gathering, choosing, args)


class GradientOrder:
    """The order in which the ranks of a ZeRO optimizer reduce the gradients of a backward pass.

    In the first backward pass it is the reverse order of registration. Later it is the order in which gradients
    arrived on the first rank, followed by the parameters that a rank did not use, so that they delay no other one.
    """

    def __init__(self, zero: Any) -> None:
        self.zero = zero
        self.is_stage3 = hasattr(zero, "fp16_groups")
        self.parameters = [
            (parameter,) if self.is_stage3 else (parameter, index)
            for index, group in enumerate(zero.fp16_groups if self.is_stage3 else zero.bit16_groups)
            for parameter in group
            if parameter.requires_grad
        ]
        self.numbers = {id(parameter): number for number, (parameter, *_) in enumerate(self.parameters)}
        self.order = list(reversed(range(len(self.parameters))))
        self.is_agreed = False
        self.arrived: list[int] = []
        self.waiting: set[int] = set()
        self.reduced = 0
        if self.is_stage3:
            patches.apply("zero-3-gradient-order", self._ordering, on=zero)
            patches.apply("zero-3-missing-gradients", self._completing, on=zero)
        else:
            patches.apply("zero-1-2-gradient-order", self._ordering, on=zero)
            patches.apply("zero-1-2-missing-gradients", self._completing, on=zero)

    def _ordering(self, reduce: Callable[..., None]) -> Callable[..., None]:
        """Reduce a gradient after those that precede it."""
        zero = self.zero

        def arrive(param: Any, *group: int) -> None:
            # Stage 1 reduces after the last micro-batch only; tiles are not ready before the last one.
            reduces = self.is_stage3 or zero.partition_gradients or zero.is_gradient_accumulation_boundary()
            number = self.numbers[id(param)]
            is_ready = getattr(param, "ds_grad_is_ready", True)
            # DeepSpeed handles or rejects gradients that arrive a second time.
            if not reduces or zero._coalesce_grad_reduction or not is_ready or number in self.order[: self.reduced]:
                reduce(param, *group)
                return
            self.arrived.append(number)
            self.waiting.add(number)
            while self.reduced < len(self.order) and (following := self.order[self.reduced]) in self.waiting:
                self.reduced += 1
                self.waiting.remove(following)
                reduce(*self.parameters[following])

        return arrive

    def _completing(self, epilogue: Callable[[], None]) -> Callable[[], None]:
        """Reduce what remains at the end of a backward pass, in order."""
        zero = self.zero

        def complete() -> None:
            if not zero._coalesce_grad_reduction:
                if not self.is_stage3:
                    zero.setup_buckets()
                for number in self.order[self.reduced :]:
                    self._fill(self.parameters[number][0])
                    zero.reduce_independent_p_g_buckets_and_remove_grads(*self.parameters[number])
                self._agree()
                self.arrived, self.waiting, self.reduced = [], set(), 0
            epilogue()

        return complete

    def _fill(self, parameter: Any) -> None:
        """Give a parameter a gradient of zeros if it has none."""
        import torch

        if self.is_stage3:
            if parameter.grad is None:
                # A gradient must have the shape of its parameter, whose own data is partitioned.
                own = parameter.data
                parameter.data = torch.zeros(parameter.ds_shape, dtype=own.dtype, device=own.device)
                parameter.grad = torch.zeros_like(parameter.data)
                parameter.data = own
        elif self.zero.get_gradient_for_reduction(parameter) is None:
            if self.zero.use_grad_accum_attribute:
                parameter.grad_accum = torch.zeros_like(parameter, dtype=self.zero.gradient_accumulation_dtype)
            else:
                parameter.grad = torch.zeros_like(parameter)

    def _agree(self) -> None:
        """Agree on the order after the first backward pass."""
        import torch.distributed as distributed

        if self.is_agreed:
            return
        group = self.zero.dp_process_group
        orders: list[Any] = [None] * distributed.get_world_size(group)
        distributed.all_gather_object(orders, self.arrived, group=group)
        used = set.intersection(*map(set, orders))
        first = [number for number in dict.fromkeys(orders[0]) if number in used]
        self.order = first + [number for number in self.order if number not in used]
        self.is_agreed = True


class EqualForwards:
    """Hooks that make every rank run the same modules with sharded parameters, in the same order.

    Ranks compare, on the hosts, which module each runs next. If they differ, all run the first of them in the order of
    registration; ranks whose rows do not need it run it with the inputs of one whose rows do. Its outputs get gradients
    of zero on all ranks, so that the backward pass also runs the same modules. Ranks compare once for a module that
    always runs all of its parts.
    """

    def __init__(
        self,
        root: Any,
        gathering: Collection[Any],
        choosing: Collection[Any],
        args: Any,
        is_sharded: Callable[[], bool] = lambda: True,
    ) -> None:
        import torch.distributed as distributed

        self.group = distributed.new_group(backend="gloo")
        self.choosing, self.device, self.is_sharded = choosing, args.device, is_sharded
        self.is_reentrant = _is_reentrant(args)
        modules = [
            (name, module) for name, module in root.named_modules() if module in gathering and module is not root
        ]
        self.names = [name for name, _ in modules]
        self.modules = [module for _, module in modules]
        self.is_running = False
        self.differing: dict[int, str] = {}
        root.register_forward_pre_hook(self._begin, prepend=True)
        root.register_forward_hook(self._end, prepend=True)
        for number, module in enumerate(self.modules):
            # Before the hook that gathers, and after the one that releases.
            module.register_forward_pre_hook(
                lambda _, args, kwargs, number=number: self._enter(number, (args, kwargs)),
                prepend=True,
                with_kwargs=True,
            )
            if module in choosing:
                module.register_forward_hook(lambda *_: self._complete(), prepend=True)
            module.register_forward_hook(lambda *arguments, number=number: self._leave(number, arguments[-1]))

    def _begin(self, *_: object) -> None:
        import torch

        self.is_running = self.is_sharded() and not in_backward_pass()
        self.inside: int | None = None
        """The module that runs, if it runs all of its parts."""
        self.joined: int | None = None
        """The module that this rank runs because another rank does."""
        self.outputs: list[Tensor] = []
        if self.is_running:
            self.differing = {}
            self.has_gradients = torch.is_grad_enabled()

    def _enter(self, number: int, inputs: Any) -> None:
        if in_backward_pass():
            if number in self.differing:
                raise self._error(number)
            return
        if not self.is_running or self.inside is not None:
            return
        if self.joined == number:
            self.joined = None
        else:
            self._agree(number, inputs)
        if self.modules[number] not in self.choosing:
            self.inside = number

    def _complete(self) -> None:
        """Run what other ranks run inside a module before leaving it, so that backward passes have one order."""
        if self.is_running and self.inside is None and not in_backward_pass():
            self._agree(len(self.modules), None)

    def _leave(self, number: int, output: Any) -> None:
        from torch.utils._pytree import tree_leaves

        if not self.is_running or in_backward_pass() or self.inside not in (None, number):
            return
        self.inside = None
        if number in self.differing:
            self.outputs += filter(_is_differentiable, tree_leaves(output))

    def _end(self, root: Any, inputs: object, output: Any) -> Any:
        from torch.utils._pytree import tree_map

        if not self.is_running or in_backward_pass():
            return output
        self._complete()
        self.is_running = False
        outputs, self.outputs = self.outputs, []
        if not outputs:
            return output
        return tree_map(lambda value: _linked().apply(value, *outputs) if _is_differentiable(value) else value, output)

    def _agree(self, number: int, inputs: Any) -> None:
        """Run the modules that only other ranks run until all ranks reach the same one."""
        import torch
        import torch.distributed as distributed
        from torch.utils._pytree import tree_map

        while True:
            own = torch.tensor([number, self._is_recomputed_later()])
            reached = [torch.empty_like(own) for _ in range(distributed.get_world_size(self.group))]
            distributed.all_gather(reached, own, group=self.group)
            numbers = [int(other[0]) for other in reached]
            first = min(numbers)
            if max(numbers) == first:
                return
            ranks = [", ".join(str(rank) for rank, n in enumerate(numbers) if (n == first) == uses) for uses in (1, 0)]
            self.differing[first] = f"the rows of rank {ranks[0]} use it and those of rank {ranks[1]} do not"
            if any(int(other[1]) for other in reached):
                raise self._error(first)
            sent: list[Any] = [None]
            if distributed.get_rank() == numbers.index(first):
                buffer = io.BytesIO()
                try:
                    torch.save((*inputs, torch.is_grad_enabled()), buffer)
                    sent = [buffer.getvalue()]
                    torch.load(io.BytesIO(sent[0]), weights_only=True)
                except Exception as error:
                    sent = [f"and its inputs cannot be sent: {error}"]
            distributed.broadcast_object_list(sent, src=numbers.index(first), group=self.group)
            if isinstance(sent[0], str):
                raise self._error(first, sent[0])
            if number == first:
                return
            received = torch.load(io.BytesIO(sent[0]), map_location=self.device, weights_only=True)
            # A module may change its inputs in place, which leaves of a graph do not permit.
            args, kwargs, has_gradients = tree_map(
                lambda value: value.clone() if _is_differentiable(value) else value, received
            )
            self.joined = first
            with torch.set_grad_enabled(has_gradients):
                self.modules[first](*args, **kwargs)

    def _is_recomputed_later(self) -> bool:
        """Return whether `torch.utils.checkpoint` will run this part of the forward pass again."""
        import torch

        if self.is_reentrant and self.has_gradients and not torch.is_grad_enabled():
            return True
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return hooks is not None and "_checkpoint_hook" in hooks[0].__qualname__

    def _error(self, number: int, reason: str = "") -> UsageError:
        name = self.names[number]
        keys = [f"{name}.{key}" for key, _ in self.modules[number].named_parameters()] or [name]
        shown = ", ".join(keys[:_MOST_NAMES]) + (", …" if len(keys) > _MOST_NAMES else "")
        reason = reason or "in a part that the backward pass recomputes"
        rule = f"{self.differing[number]}, {reason}; ranks would gather different parameters"
        fix = "turn gradient checkpointing off, use ZeRO-2 or DDP, or give all ranks rows of one kind in each step"
        return UsageError(ConfigError(where=shown, rule=rule, fix=fix))


def _is_selection(module: Any) -> bool:
    """Return whether a module has several parts of which the module around it selects, such as PEFT's adapters."""
    from torch.nn import ModuleDict, ParameterDict, ParameterList

    return isinstance(module, ModuleDict | ParameterDict | ParameterList) and len(module) > 1


def _is_differentiable(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and value.requires_grad


@cache
def _linked() -> Any:
    import torch

    class Linked(torch.autograd.Function):
        """Return the first input; the others get gradients of zero."""

        @staticmethod
        def forward(ctx: Any, value: Tensor, *others: Tensor) -> Tensor:
            ctx.zeros = [torch.zeros_like(other) for other in others]
            return value.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            return gradients[0], *ctx.zeros

    return Linked
