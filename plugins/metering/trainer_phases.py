"""Tells a meter which phase of a training step the Trainer is in (seen with transformers 5.17 and accelerate 1.15)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import TrainerCallback

from .byte_meter import Meter

WARM_UP_STEPS = 2
"""Optimizer states and DDP's final buckets appear in the first step; ZeRO-3 prefetches from the second step on."""

_OPTIMIZER_ATTRIBUTES = (
    "single_partition_of_fp32_groups",
    "fp32_partitioned_groups_flat",
    "fp32_groups_flat_partition",
)
_WEIGHT_ATTRIBUTES = ("bit16_groups_flat", "fp16_partitioned_groups_flat", "bf16_groups_flat")
_GRADIENT_ATTRIBUTES = ("averaged_gradients", "grad_partitions_flat_buffer", "fp32_groups_gradients_flat")


def meter_trainer(trainer: Any, meter: Meter, *, warm_up_steps: int = WARM_UP_STEPS) -> None:
    """Let `meter` follow the phases of `trainer`'s steps, and forget the first `warm_up_steps` of them.

    The loss phase lasts from the output head's forward pass until the gradient reaches the head's input; without an
    output head the forward phase includes it. Call it before `trainer.train()`.
    """
    compute_loss: Callable[..., Any] = trainer.compute_loss

    def metered_loss(*args: Any, **kwargs: Any) -> Any:
        meter.enter("forward")
        return compute_loss(*args, **kwargs)

    trainer.compute_loss = metered_loss
    _hook_gradients(trainer.model, meter)
    trainer.add_callback(_PhaseCallback(trainer, meter, warm_up_steps))


class _PhaseCallback(TrainerCallback):
    def __init__(self, trainer: Any, meter: Meter, warm_up_steps: int) -> None:
        self._trainer = trainer
        self._meter = meter
        self._warm_up_steps = warm_up_steps
        self._wrapped = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._wrapped:
            self._wrapped = True
            # Tensor parallelism replaces the output head when the engine is made.
            _mark_loss(self._trainer.model, self._meter)
            self._wrap_step()
        self._label()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._meter.enter("other")
        if state.global_step == self._warm_up_steps:
            self._meter.reset_peaks()

    def _wrap_step(self) -> None:
        """DeepSpeed steps inside `accelerator.backward`; elsewhere the step begins when that returns."""
        accelerator = self._trainer.accelerator
        engine = getattr(accelerator, "deepspeed_engine_wrapped", None)
        if engine is not None:
            self._enter_before_step(engine.engine)
            return
        backward = accelerator.backward

        def metered_backward(*args: Any, **kwargs: Any) -> Any:
            result = backward(*args, **kwargs)
            self._enter_step()
            return result

        accelerator.backward = metered_backward

    def _enter_before_step(self, engine: Any) -> None:
        step: Callable[..., Any] = engine.step

        def metered_step(*args: Any, **kwargs: Any) -> Any:
            self._enter_step()
            return step(*args, **kwargs)

        engine.step = metered_step

    def _enter_step(self) -> None:
        if not self._trainer.accelerator.sync_gradients:
            self._meter.enter("other")
            return
        self._label()
        self._meter.enter("step")

    def _label(self) -> None:
        """Name what the engine holds between steps."""
        model, optimizer = self._trainer.model_wrapped, self._trainer.optimizer
        parameters = list(model.parameters())
        self._meter.label(_shards(parameters), "weights")
        self._meter.label((p.grad for p in parameters if p.grad is not None), "gradients")
        for holder in _chain(optimizer):
            self._meter.label(_tensors(getattr(holder, "state", None)), "optimizer")
            for role, names in (
                ("optimizer", _OPTIMIZER_ATTRIBUTES),
                ("weights", _WEIGHT_ATTRIBUTES),
                ("gradients", _GRADIENT_ATTRIBUTES),
            ):
                for name in names:
                    self._meter.label(_tensors(getattr(holder, name, None)), role)  # type: ignore[arg-type]
            for name in ("ipg_buckets", "_DeepSpeedZeroOptimizer_Stage3__ipg_bucket_flat_buffer"):
                self._meter.label(_bucket_tensors(getattr(holder, name, None)), "buckets")


def _mark_loss(model: Any, meter: Meter) -> None:
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None:
        return

    def enter_loss(_: Any, inputs: tuple[Any, ...]) -> None:
        if inputs and isinstance(inputs[0], torch.Tensor) and inputs[0].requires_grad and torch.is_grad_enabled():
            meter.enter("loss")
            inputs[0].register_hook(lambda _: meter.enter("backward"))

    head.register_forward_pre_hook(enter_loss)


def _hook_gradients(model: Any, meter: Meter) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: meter.label([gradient], "gradients"))


def _chain(optimizer: Any) -> Iterator[Any]:
    """Accelerate wraps DeepSpeed's optimizer, which wraps torch's; each holds tensors of its own."""
    seen = 0
    while optimizer is not None and seen < 4:
        yield optimizer
        optimizer, seen = getattr(optimizer, "optimizer", None), seen + 1


def _shards(parameters: list[Any]) -> Iterator[torch.Tensor]:
    for parameter in parameters:
        yield parameter.data if not hasattr(parameter, "_local_tensor") else parameter
        for name in ("ds_tensor", "ds_secondary_tensor"):
            shard = getattr(parameter, name, None)
            if isinstance(shard, torch.Tensor):
                yield shard


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors(inner)


def _bucket_tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, dict):
        for bucket in value.values():
            yield from _tensors(getattr(bucket, "buffer", None))
    else:
        yield from _tensors(value)
