"""Prepare a Trainer's model once: for its first evaluation or training run, and for all later ones.

With transformers 5.17.0 and 5.23.0, and accelerate 1.15.0:

- `evaluate` and `predict` before `train` prepare the model without its optimizer. DDP then trains without reducing
  gradients, ZeRO-1, ZeRO-2 and FSDP2 fail, and ZeRO-3 trains with an engine that has no optimizer.
- A second `train` destroys the DeepSpeed engine that it trains with.
- Engines keep the gradients of a step that an exception interrupted.
- CPU Adam cannot step with the settings of a checkpoint that an optimizer on the accelerator saved.

`exact.ExactTrainer` calls what is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ...ds_configs.specs.errors import ConfigError, UsageError
from .. import patches
from .unused_parameters import accept_unused_parameters, find_unused_parameters, modules_with_choice

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
    if resume_from_checkpoint is not None and getattr(trainer.model_wrapped, "has_moe_layers", False):
        # Measured: the loss of the next step differs by 0.06 from one process.
        rule = "is not supported after an evaluation or a training run under expert parallelism"
        fix = "create a new Trainer and call train(resume_from_checkpoint=...) first"
        raise UsageError(ConfigError(where="resume_from_checkpoint", rule=rule, fix=fix))
    _drop_gradients(trainer)
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


def _drop_gradients(trainer: Any) -> None:
    """Remove what an interrupted step has accumulated inside an engine; the Trainer clears `weight.grad`."""
    from torch.distributed.fsdp import FSDPModule

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
