"""DeepSpeed's pipeline engine: an exact gradient norm, batches of the own replica, evaluation without an optimizer.

Seen with deepspeed 0.19.8 and accelerate 1.15.0, two and four gloo ranks:

- ``clip_fp32_gradients`` (ZeRO-0 in fp32) counts the gradients of the first stage alone, because the parameters of
  the other stages lack the mark ``model_parallel`` that ``clip_grad_norm_`` (runtime/utils.py) asks for. Every stage
  then clips with a norm that is too small, and the norm is kept nowhere.
- ``_exec_send_activations`` tells the next stage the shape of what follows for the first micro-batch only, unless
  ``dynamic_shape`` is on, which tells it for every micro-batch and waits for the device each time.
- ``_exec_backward_pass`` of the last stage returns before it lets go of the outputs, so that the logits of one
  micro-batch live until the next one's are there; an evaluation never lets go of its last ones.
- ``DualPipeVEngine.eval_batch`` looks for phase-1 buffers where training keeps them, so that an evaluation of another
  number of micro-batches than ``gradient_accumulation_steps`` reads an empty one.
- Accelerate hands each rank other samples, and the Trainer seeds the workers of each rank's loader differently; all
  stages of one pipeline need the same.
- ``HfTrainerDeepSpeedConfig`` computes ``train_batch_size`` as if every rank read samples of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_BATCH_KEY = "train_batch_size"
_REMEMBERED = "_written_global_batch"


def read_own_replica(accelerator: Any, *, replicas: int, replica: int) -> None:
    """Make an accelerator shard data loaders over the copies of a pipeline instead of over all ranks.

    Args:
        accelerator: Accelerate's `Accelerator`.
        replicas: Copies of the pipeline.
        replica: Which of them this rank is a stage of.
    """
    from accelerate.data_loader import prepare_data_loader

    def prepare(data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None) -> Any:
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return data_loader
        data_loader.worker_init_fn = _seeded_by_replica(data_loader.worker_init_fn, replica)
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

    accelerator.prepare_data_loader = prepare


def _seeded_by_replica(worker_init_fn: Any, replica: int) -> Any:
    """Return the Trainer's seeding of workers (transformers 5.17.0, `seed_worker`) with the replica as its rank."""
    if "rank" not in getattr(worker_init_fn, "keywords", {}):
        return worker_init_fn
    keywords = {**worker_init_fn.keywords, "rank": replica}
    return partial(worker_init_fn.func, *worker_init_fn.args, **keywords)


def written_global_batch(given: Any, hf_deepspeed_config: Any) -> Any:
    """Return the `train_batch_size` that a user wrote, which is `auto` or missing where it is to be computed.

    Args:
        given: What `TrainingArguments(deepspeed=...)` got; `None` with a configuration from `accelerate launch`.
        hf_deepspeed_config: The configuration in use, which the Trainer may have completed; what it held when it was
            first asked for is remembered on it, so that a second trainer takes no value of the first for the user's.
    """
    if not hasattr(hf_deepspeed_config, _REMEMBERED):
        config = hf_deepspeed_config.config
        if given is not None:
            from accelerate.utils.deepspeed import HfDeepSpeedConfig

            config = getattr(given, "config", None) or HfDeepSpeedConfig(given).config
        setattr(hf_deepspeed_config, _REMEMBERED, config.get(_BATCH_KEY))
    return getattr(hf_deepspeed_config, _REMEMBERED)


def set_global_batch(hf_deepspeed_config: Any, *, written: Any, replicas: int) -> int | None:
    """Put the samples of one optimizer step into a DeepSpeed configuration; return a written value that contradicts.

    Sizes that are still `auto` are left so: the Trainer fills in those of a configuration that `accelerate launch`
    announced, when it makes its accelerator.

    Args:
        hf_deepspeed_config: `HfTrainerDeepSpeedConfig`, or before the Trainer exists Accelerate's own.
        written: `written_global_batch(...)` of this configuration.
        replicas: Copies of the pipeline.
    """
    # Transformers may have replaced the configuration that was asked.
    setattr(hf_deepspeed_config, _REMEMBERED, written)
    config = hf_deepspeed_config.config
    sizes = [config.get(key, "auto") for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")]
    if "auto" in sizes:
        return None
    samples = sizes[0] * sizes[1] * replicas
    if hasattr(hf_deepspeed_config, "mismatches"):
        hf_deepspeed_config.mismatches = [
            line for line in hf_deepspeed_config.mismatches if f"ds {_BATCH_KEY}=" not in line
        ]
    if written not in (None, "auto", samples):
        return int(written)
    config[_BATCH_KEY] = samples
    return None


def repair_clipping(engine: Any) -> None:
    """Make a pipeline engine clip ZeRO-0 gradients in fp32 by the norm over all stages, tied weights once."""

    def clip() -> None:
        grid = engine.grid
        holds_whole = grid.get_slice_parallel_rank() == 0
        counted = (p for p in engine.module.parameters() if counts_in_norm(p, holds_whole=holds_whole))
        norm = gradient_norm(counted, grid.get_model_parallel_group(), engine.device)
        engine._global_grad_norm = norm
        factor = engine.gradient_clipping() / (norm + 1e-6)
        if factor < 1:
            for parameter in engine.module.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    engine.clip_fp32_gradients = clip


def counts_in_norm(parameter: Any, *, holds_whole: bool) -> bool:
    """Whether this rank counts a parameter in the norm of all stages, so that some rank does and no second one.

    Args:
        parameter: A parameter of this rank's stage.
        holds_whole: Whether this rank answers for what each rank of its tensor-parallel group holds whole.
    """
    from deepspeed.runtime.utils import is_model_parallel_parameter

    copy = getattr(parameter, "ds_pipe_replicated", False)
    return not copy and (holds_whole or is_model_parallel_parameter(parameter))


def gradient_norm(parameters: Iterable[torch.Tensor], group: Any, device: Any) -> torch.Tensor:
    """Return the 2-norm of the gradients of all ranks of a group, each of which counts its own parameters."""
    import torch
    import torch.distributed as dist

    squares = torch.zeros((), dtype=torch.float32, device=device)
    for parameter in parameters:
        if parameter.grad is not None:
            squares += parameter.grad.float().pow(2).sum()
    dist.all_reduce(squares, group=group)
    return squares.sqrt()


def free_logits_early(engine: Any) -> None:
    """Make the last stage of a 1F1B engine keep a micro-batch's loss alone, whose graph holds what backward needs.

    An evaluation that is asked for logits keeps them elsewhere, in `engine.outputs`.
    """
    from deepspeed.runtime.pipe import schedule

    forward, backward = (engine._INSTRUCTION_MAP[kind] for kind in (schedule.ForwardPass, schedule.BackwardPass))

    def forward_pass(self: Any, buffer_id: int) -> None:
        forward(self, buffer_id)
        if self.is_last_stage():
            self.pipe_buffers["outputs"][buffer_id] = None

    def backward_pass(self: Any, buffer_id: int) -> None:
        backward(self, buffer_id)
        self.pipe_buffers["labels"][buffer_id] = None

    if type(engine).__name__ != "DualPipeVEngine":
        replaced = {schedule.ForwardPass: forward_pass, schedule.BackwardPass: backward_pass}
        engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, **replaced}


def optimizer_step(engine: Any, micro_batches: Sequence[Any]) -> torch.Tensor:
    """Train one optimizer step on micro-batches of one shape and return the mean loss over replicas, on every rank."""
    with _micro_batches(engine, len(micro_batches)):
        loss: torch.Tensor = engine.train_batch(iter(micro_batches))
    return loss


def summed_loss(engine: Any, micro_batches: Sequence[Any], *, replicas: int) -> torch.Tensor:
    """Return the sum of the micro-batches' losses over all replicas, on every rank and without training."""
    count = len(micro_batches)
    with _micro_batches(engine, count):
        mean: torch.Tensor = engine.eval_batch(iter(micro_batches), num_micro_batches=count)
    return mean * (count * replicas)


def whole_logits(engine: Any, inputs: tuple[torch.Tensor, ...], labels_BS: torch.Tensor) -> torch.Tensor:
    """Return the logits [B, S, V] of one batch on every rank of the pipeline, in evaluation mode.

    Args:
        engine: The pipeline engine.
        inputs: What the first stage reads: token ids, and a mask and positions if there are any.
        labels_BS: Labels, of which the loss is computed and thrown away.
    """
    import torch
    import torch.distributed as dist

    engine.reset_activation_shape()
    batch = (inputs, (labels_BS, torch.ones((), device=engine.device)))
    repeated = 2 * engine.num_stages if hasattr(engine.module, "activate_phase") else 1
    with _micro_batches(engine, repeated):
        _, logits = engine.eval_batch(iter([batch] * repeated), return_logits=True, num_micro_batches=repeated)
    engine.reset_activation_shape()
    source = engine._loss_stage_global_rank()
    held = [None if logits is None else logits.detach().cpu()]
    dist.broadcast_object_list(held, src=source, group=engine.grid.get_pipe_parallel_group())
    assert held[0] is not None, "the stage with the head holds them"
    return held[0]


@contextmanager
def _micro_batches(engine: Any, count: int) -> Iterator[None]:
    """Let one step have fewer micro-batches than the configuration says, as the last one of an epoch."""
    usual, engine.micro_batches = engine.micro_batches, count
    try:
        yield
    finally:
        engine.micro_batches = usual


class ShapeWatch:
    """Makes both ends of a stage border forget the shape of activations when the next micro-batches have another."""

    def __init__(self) -> None:
        self._last: tuple[Any, ...] = ()

    def expect(self, engine: Any, inputs: Sequence[torch.Tensor]) -> None:
        """Say that the next micro-batches of an engine are like these inputs; all stages must say the same."""
        now = (id(engine), *((tuple(tensor.shape), tensor.dtype) for tensor in inputs))
        if now != self._last:
            engine.reset_activation_shape()
            self._last = now


def evaluation_engine(module: Any, config: dict[str, Any]) -> Any:
    """Return an engine over a pipeline module that only evaluates, made without an optimizer.

    Args:
        module: DeepSpeed's `PipelineModule`.
        config: The training configuration; its ZeRO stage and optimizer are left out.
    """
    import deepspeed

    left_out = ("optimizer", "scheduler", "zero_optimization")
    kept = {key: value for key, value in config.items() if key not in left_out}
    engine = deepspeed.initialize(model=module, config=kept)[0]
    free_logits_early(engine)
    return engine
