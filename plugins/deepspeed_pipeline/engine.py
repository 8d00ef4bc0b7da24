"""DeepSpeed's pipeline engine: an exact gradient norm, batches per replica, and evaluation without an optimizer.

Observed with deepspeed 0.19.8 and accelerate 1.15.0, two and four gloo ranks:

- ``clip_fp32_gradients`` (ZeRO-0 in fp32) counts only the first stage's gradients, because the parameters of the other
  stages lack the mark ``model_parallel`` that ``clip_grad_norm_`` (runtime/utils.py) requires. Every stage then clips
  by a norm that is too small, and the norm is not kept.
- ``_exec_send_activations`` sends the shape of activations to the next stage only for the first micro-batch, unless
  ``dynamic_shape`` is on, which sends it for every micro-batch and waits for the device each time.
- ``_exec_backward_pass`` of the last stage returns before it frees the outputs, so the logits of one micro-batch live
  until the next one's exist; an evaluation never frees its last logits.
- Accelerate gives each rank different samples, and the Trainer seeds the workers of each rank's loader differently; all
  stages of one pipeline need the same samples.
- ``HfTrainerDeepSpeedConfig`` computes ``train_batch_size`` as if every rank read different samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from .. import patches

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from deepspeed import DeepSpeedEngine

BATCH_KEY = "train_batch_size"


def read_own_replica(accelerator: Accelerator, *, replicas: int, replica: int) -> None:
    """Make an accelerator shard data loaders over the replicas of a pipeline instead of over all ranks."""
    from accelerate.data_loader import prepare_data_loader

    def prepare(data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None) -> Any:
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return data_loader
        seed = data_loader.worker_init_fn
        if "rank" in getattr(seed, "keywords", {}):
            # The Trainer's seeding of workers (transformers 5.17.0, `seed_worker`), with the replica as its rank.
            data_loader.worker_init_fn = partial(seed.func, *seed.args, **{**seed.keywords, "rank": replica})
        prepared = prepare_data_loader(
            data_loader,
            accelerator.device,
            num_processes=replicas,
            process_index=replica,
            put_on_device=accelerator.device_placement if device_placement is None else device_placement,
            rng_types=accelerator.rng_types.copy(),
            dispatch_batches=False,
            even_batches=accelerator.even_batches,
            use_seedable_sampler=accelerator.use_seedable_sampler,
            data_seed=accelerator.dataloader_config.data_seed,
            non_blocking=accelerator.non_blocking,
            use_stateful_dataloader=accelerator.use_stateful_dataloader,
        )
        accelerator._dataloaders.append(prepared)
        return prepared

    patches.apply("pipeline-data-loader", lambda _: prepare, on=accelerator)


def set_global_batch(hf_deepspeed_config: Any, samples: int) -> None:
    """Set the samples of an optimizer step in a DeepSpeed configuration, whatever Transformers has computed."""
    hf_deepspeed_config.config[BATCH_KEY] = samples
    if hasattr(hf_deepspeed_config, "mismatches"):
        hf_deepspeed_config.mismatches = [
            line for line in hf_deepspeed_config.mismatches if f"ds {BATCH_KEY}=" not in line
        ]


def repair_clipping(engine: DeepSpeedEngine) -> None:
    """Make a pipeline engine clip fp32 ZeRO-0 gradients by the norm over all stages, counting tied weights once."""

    def clip() -> None:
        import torch
        import torch.distributed as dist
        from deepspeed.runtime.utils import is_model_parallel_parameter

        grid, squares = engine.grid, torch.zeros((), dtype=torch.float32, device=engine.device)
        # Exactly one rank counts a parameter that is tied, or replicated in a tensor-parallel group.
        counts_replicated = grid.get_slice_parallel_rank() == 0
        for parameter in engine.module.parameters():
            counts = counts_replicated or is_model_parallel_parameter(parameter)
            if counts and parameter.grad is not None and not getattr(parameter, "ds_pipe_replicated", False):
                squares += parameter.grad.float().pow(2).sum()
        dist.all_reduce(squares, group=grid.get_model_parallel_group())
        engine._global_grad_norm = norm = squares.sqrt()
        factor = engine.gradient_clipping() / (norm + 1e-6)
        if factor < 1:
            for parameter in engine.module.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    patches.apply("pipeline-clipping", lambda _: clip, on=engine)


def free_logits_early(engine: DeepSpeedEngine) -> None:
    """Make the last stage of a 1F1B engine keep only a micro-batch's loss, whose graph holds what backward needs.

    An evaluation that returns logits keeps them in `engine.outputs`.
    """

    def freeing(instructions: dict[type, Callable[..., None]]) -> dict[type, Callable[..., None]]:
        from deepspeed.runtime.pipe import schedule

        forward, backward = (instructions[kind] for kind in (schedule.ForwardPass, schedule.BackwardPass))

        def forward_pass(self: Any, buffer_id: int) -> None:
            forward(self, buffer_id)
            if self.is_last_stage():
                self.pipe_buffers["outputs"][buffer_id] = None

        def backward_pass(self: Any, buffer_id: int) -> None:
            backward(self, buffer_id)
            self.pipe_buffers["labels"][buffer_id] = None

        return {**instructions, schedule.ForwardPass: forward_pass, schedule.BackwardPass: backward_pass}

    patches.apply("freed-logits", freeing, on=engine)


def optimizer_step(engine: DeepSpeedEngine, micro_batches: Sequence[Any]) -> torch.Tensor:
    """Train one optimizer step on micro-batches of one shape and return the mean loss over replicas, on every rank."""
    with _micro_batches(engine, len(micro_batches)):
        loss: torch.Tensor = engine.train_batch(iter(micro_batches))
    return loss


def summed_loss(engine: DeepSpeedEngine, micro_batches: Sequence[Any], *, replicas: int) -> torch.Tensor:
    """Evaluate micro-batches and return the sum of their losses over all replicas, on every rank."""
    count = len(micro_batches)
    with _micro_batches(engine, count):
        mean: torch.Tensor = engine.eval_batch(iter(micro_batches), num_micro_batches=count)
    return mean * (count * replicas)


def whole_logits(engine: DeepSpeedEngine, inputs: tuple[torch.Tensor, ...], labels_BS: torch.Tensor) -> torch.Tensor:
    """Return the logits [B, S, V] of one batch on every rank of the pipeline, in evaluation mode.

    `inputs` are those of the first stage: token ids, and a mask and positions if there are any.
    """
    import torch
    import torch.distributed as dist

    engine.reset_activation_shape()
    batch = (inputs, (labels_BS, torch.ones((), device=engine.device)))
    with _micro_batches(engine, 1):
        _, logits = engine.eval_batch(iter([batch]), return_logits=True, num_micro_batches=1)
    engine.reset_activation_shape()
    source = engine._loss_stage_global_rank()
    held = [None if logits is None else logits.detach().cpu()]
    dist.broadcast_object_list(held, src=source, group=engine.grid.get_pipe_parallel_group())
    assert held[0] is not None, "the stage with the head holds them"
    return held[0]


@contextmanager
def _micro_batches(engine: DeepSpeedEngine, count: int) -> Iterator[None]:
    """Run a step with another number of micro-batches than the configuration's, such as the last of an epoch."""
    usual, engine.micro_batches = engine.micro_batches, count
    try:
        yield
    finally:
        engine.micro_batches = usual


class ShapeWatch:
    """Makes sending and receiving stages forget the shape of activations if the next micro-batches have another."""

    def __init__(self) -> None:
        self._last: tuple[Any, ...] = ()

    def expect(self, engine: DeepSpeedEngine, inputs: Sequence[torch.Tensor]) -> None:
        """Set the shapes of an engine's next micro-batches; all stages must pass inputs of the same shapes."""
        now = (id(engine), *((tuple(tensor.shape), tensor.dtype) for tensor in inputs))
        if now != self._last:
            engine.reset_activation_shape()
            self._last = now
