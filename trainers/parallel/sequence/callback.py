"""Trainer callback for Ulysses sequence parallelism: ranks share the sequences of a causal language model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

from transformers import TrainerCallback

from ....ds_configs.legality.axes import attention_errors, sample_errors
from ....ds_configs.specs.errors import ConfigError, UsageError
from ....ds_configs.specs.layout import Engine
from ....plugins import patches
from ....plugins.deepspeed.engine import accept_train_batch_size
from ....plugins.deepspeed.ulysses import (
    SharedSequence,
    forget_sequence_parallelism,
    gradients_are_added_over_a_sequence,
)
from ....plugins.transformers.prepared_model import is_prepared
from ....plugins.transformers.run_settings import trainer_errors
from ...counting.counts import count_as_one_process
from ..long_sequences import LongSequenceCallback, computes_own_loss, tiling_errors
from .checks import argument_errors, base_model, model_errors
from .shards import (
    LABELS,
    SHIFT_LABELS,
    Shard,
    cut,
    digest_of,
    example_of,
    joined,
    labelled_tokens,
    mask_dimensions,
    padding_and_packing,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, TrainerControl, TrainerState, TrainingArguments
    from transformers import Trainer as _TrainerMethods
else:
    _TrainerMethods = object

LossReduction = Literal["mean", "sum"]
_LOGIT_HOOKS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""The hook that `attach` registered on each model."""


class SequenceParallelCallback(TrainerCallback):
    """Train and evaluate a causal language model whose sequences `sequence_parallel_size` ranks share.

    Each rank holds a shard of every sequence; within attention it holds a shard of the heads instead (DeepSpeed
    Ulysses, arXiv 2309.14509, in the form of arXiv 2506.13996). Loss, gradients, clipping and evaluation are those of
    one process with the same global batch: the loss is the mean over the labelled tokens of the optimizer step. The
    load-balancing loss of a mixture of experts (`output_router_logits`) is computed per shard, not per sequence, and
    weighted by the labelled tokens of the shard.

    Args:
        sequence_parallel_size: Number of consecutive ranks that share a sequence.
        tiled_mlp: As in `LongSequenceCallback`, of which this callback creates one.
        tiled_loss: As in `LongSequenceCallback`.
        offloaded_checkpoints: As in `LongSequenceCallback`.
        loss_reduction: What the Trainer's own loss (`compute_loss` of a subclass, or `compute_loss_func`) returns for
            its samples: the mean over their labelled tokens, or the sum.
        loss_shifts_labels: Whether that loss itself drops the first label and the last logit, as the losses of
            Transformers do. It then gets one more label and logit than the shard has tokens, so that no label is lost
            between shards. With `False` it gets labels that are aligned with the logits.

    Example:
        >>> callback = SequenceParallelCallback(2)
        >>> callback.prepare(arguments, model)
        >>> trainer = Trainer(model=model, args=arguments, train_dataset=dataset)
        >>> callback.attach(trainer)
        >>> trainer.train()
    """

    def __init__(
        self,
        sequence_parallel_size: int,
        *,
        tiled_mlp: bool | int = False,
        tiled_loss: bool | int = False,
        offloaded_checkpoints: int | None = None,
        loss_reduction: LossReduction = "mean",
        loss_shifts_labels: bool = True,
    ) -> None:
        if sequence_parallel_size < 1:
            rule = "must be a positive number of ranks"
            raise UsageError(ConfigError(where="sequence_parallel_size", value=sequence_parallel_size, rule=rule))
        if loss_reduction not in ("mean", "sum"):
            raise UsageError(ConfigError(where="loss_reduction", value=loss_reduction, rule="must be 'mean' or 'sum'"))
        self.sequence_parallel_size = sequence_parallel_size
        self.long_sequences = LongSequenceCallback(
            tiled_mlp=tiled_mlp, tiled_loss=tiled_loss, offloaded_checkpoints=offloaded_checkpoints
        )
        self.loss_reduction: LossReduction = loss_reduction
        self.loss_shifts_labels = loss_shifts_labels
        self._attached = False

    def prepare(self, training_arguments: TrainingArguments, model: PreTrainedModel) -> None:
        """Check the model and the layout, and configure Accelerate; call it before the Trainer is created.

        Raises:
            UsageError: model, arguments or DeepSpeed section do not support it; lists all errors.
        """
        size, world_size = self.sequence_parallel_size, training_arguments.world_size
        engine: Engine = "ddp" if training_arguments.deepspeed_plugin is None else "deepspeed"
        errors = model_errors(model, size=size, world_size=world_size, engine=engine)
        if size > 1:
            attention = base_model(model).config._attn_implementation
            errors += argument_errors(training_arguments, size=size, attention=attention)
        tiles = self.long_sequences
        errors += tiling_errors(model, training_arguments, tiled_mlp=tiles.tiled_mlp, tiled_loss=tiles.tiled_loss)
        if errors:
            raise UsageError(errors)
        if size > 1:
            forget_sequence_parallelism()
            accept_train_batch_size(training_arguments, size=size)
            training_arguments.parallelism_config = parallelism_config(size, world_size, attention=attention)

    def attach(self, trainer: Any) -> None:
        """Replace the Trainer's methods that read, compute and count; call it right after the Trainer is created.

        Raises:
            UsageError: `prepare` was not called with this Trainer's arguments, or the Trainer's class runs sequence
                parallelism itself.
        """

        size = self.sequence_parallel_size
        errors = self.long_sequences.errors(trainer)
        if size > 1:
            _check_trainer(trainer, size)
            if errors := errors + trainer_errors(trainer):
                raise UsageError(errors)
            run = SequenceParallelRun(
                shared=SharedSequence(size),
                loss_reduction=self.loss_reduction,
                loss_shifts_labels=self.loss_shifts_labels,
                has_own_loss=computes_own_loss(trainer),
            )
            _replace_methods(trainer, run)
            if trainer.compute_loss_func is not None and self.loss_reduction == "mean":
                trainer.compute_loss_func = _mean_over_shard(trainer.compute_loss_func, run)
            count_as_one_process(trainer, ranks_of_a_sample=size)
        if errors:
            raise UsageError(errors)
        self.long_sequences.tile(trainer)
        self._attached = True
        if not any(callback is self for callback in trainer.callback_handler.callbacks):
            trainer.add_callback(self)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: PreTrainedModel | None = None,
        **kwargs: object,
    ) -> None:
        """Check that `attach` was called, and begin what `LongSequenceCallback` does.

        Raises:
            UsageError: `attach` was not called.
        """
        if not self._attached:
            rule = "callback.attach(trainer) was not called, so the ranks would not share sequences"
            fix = "call it right after Trainer(...)"
            raise UsageError(ConfigError(where="SequenceParallelCallback", rule=rule, fix=fix))
        self.long_sequences.on_train_begin(args, state, control, model, **kwargs)


def parallelism_config(size: int, world_size: int, *, attention: str) -> Any:
    """Return Accelerate's configuration of Ulysses; the other ranks become `dp_shard`."""
    from accelerate import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation=attention)
    return ParallelismConfig(
        sp_size=size, sp_backend="deepspeed", dp_shard_size=world_size // size, dp_replicate_size=1, sp_handler=handler
    )


def _check_trainer(trainer: Any, size: int) -> None:
    axes = trainer.accelerator.parallelism_config
    if axes is None or axes.sp_size != size:
        rule = "callback.prepare(training_arguments, model) was not called before the Trainer was created"
        fix = "call it with the Trainer's arguments"
        raise UsageError(ConfigError(where="SequenceParallelCallback", rule=rule, fix=fix))
    if isinstance(trainer, SequenceParallelMethods):
        rule = "callback.attach(trainer) was called already"
        raise UsageError(ConfigError(where="SequenceParallelCallback", rule=rule, fix="call it once"))
    if getattr(trainer, "shares_sequences", False):
        rule = "runs sequence parallelism itself, with TrainingArguments.parallelism_config"
        fix = "omit the callback, or plan without sp"
        raise UsageError(ConfigError(where="trainer", value=type(trainer).__name__, rule=rule, fix=fix))


def _replace_methods(trainer: Any, run: SequenceParallelRun) -> None:
    """Put `SequenceParallelMethods` before the Trainer's class, and let all ranks of a sequence read its batches."""
    import torch.distributed as dist
    from accelerate import ParallelismConfig
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.functional import pad

    class HiddenFromTheTrainer(ParallelismConfig):
        """Reports no sequence parallelism to transformers 5.17.0 (trainer.py, `sp_enabled`).

        A Trainer that sees it would wrap the data loader and replace the loss. Accelerate 1.15.0 reads `sp_size`.
        """

        sp_enabled = False

    shared, accelerator = run.shared, trainer.accelerator
    # Batches stay in host memory until a rank has its shards.
    accelerator.device_placement = False
    # Accelerate cannot dispatch streams from the first rank to ranks that share a batch.
    accelerator.dataloader_config.dispatch_batches = False
    hidden = HiddenFromTheTrainer.__new__(HiddenFromTheTrainer)
    hidden.__dict__.update(accelerator.parallelism_config.__dict__)
    accelerator.state.parallelism_config = hidden
    # Accelerate reads the same batches on all ranks of the dimension `tp`.
    shape = (dist.get_world_size() // shared.size, shared.size)
    accelerator.state.ds_device_mesh = init_device_mesh(accelerator.device.type, shape, mesh_dim_names=("dp", "tp"))
    # `compute_loss` below divides by the tokens of the step, whatever the class does with those of a micro-batch.
    trainer.model_accepts_loss_kwargs = trainer.loss_is_scaled_for_ga = True
    trainer.sequence_parallel = run
    own = type(trainer)
    kind = type(own.__name__, (SequenceParallelMethods, own), {"__module__": own.__module__})
    patches.swap_class("sequence-parallel-trainer", trainer, kind)
    earlier = _LOGIT_HOOKS.pop(trainer.model, None)
    if earlier is not None:
        earlier.remove()
    if run.extends_logits:

        def add_logit(_module: Any, _inputs: Any, outputs: Any) -> None:
            if shared.active and getattr(outputs, "logits", None) is not None:
                outputs["logits"] = pad(outputs.logits, (0, 0, 0, 1))

        _LOGIT_HOOKS[trainer.model] = trainer.model.register_forward_hook(add_logit)


def _mean_over_shard(compute: Callable[..., Any], run: SequenceParallelRun) -> Callable[..., Any]:
    """Make a loss function that divides by `num_items_in_batch` return the mean over the labelled tokens of a shard."""

    def compute_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        items = run.labelled.clamp(min=1) if run.shared.active and run.labelled is not None else num_items_in_batch
        return compute(outputs, labels, num_items_in_batch=items)

    return compute_loss


@dataclass(kw_only=True)
class SequenceParallelRun:
    """State that the methods of one Trainer share."""

    shared: SharedSequence
    """The ranks of a sequence."""
    loss_reduction: LossReduction
    """Whether the loss of a shard is the mean over its labelled tokens or their sum."""
    loss_shifts_labels: bool
    """Whether the Trainer's own loss drops the first label and the last logit itself."""
    has_own_loss: bool
    """Whether the Trainer computes another loss than the model's, from its logits."""
    is_connected: bool = False
    """Whether a forward pass has shown that attention exchanges heads in every layer."""
    whole_tokens: int = 0
    """Tokens of the batch that was sharded last."""
    labelled: torch.Tensor | None = None
    """Labelled tokens in this rank's shard of it."""
    step_tokens: torch.Tensor | None = None
    """Labelled tokens of all micro-batches of the optimizer step that was counted last."""

    @property
    def extends_logits(self) -> bool:
        """Whether logits get one more position, for a loss that drops the last one."""
        return self.has_own_loss and self.loss_shifts_labels


class SequenceParallelMethods(_TrainerMethods):
    """Overrides of a Trainer: all ranks of a sequence read the same batches, and each computes its own shard.

    The class precedes the Trainer's own class, so that `super()` finds the `compute_loss` of a subclass.
    """

    sequence_parallel: SequenceParallelRun

    def get_sp_size(self) -> int:
        """Return 1: the Trainer would otherwise count the batches of a data loader that is not used here."""
        return 1

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Return the samples of an optimizer step; the ranks of one sequence count once."""
        return int(super().get_total_train_batch_size(args) // self.sequence_parallel.shared.size)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Return this rank's shards of the micro-batches of an optimizer step; only shards reach the accelerator."""
        batches = _equal_batches(epoch_iterator, self.sequence_parallel.shared, self.args.device)
        whole, count = super().get_batch_samples(batches, num_batches, device)
        return [self._cut(batch).batch() for batch in whole], count

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        run = self.sequence_parallel
        _check_samples(batch_samples, self.model.config._attn_implementation)
        count = labelled_tokens(batch_samples)
        if count is not None:
            count = self.accelerator.gather(count.to(device)).sum() // run.shared.size
        run.step_tokens = count
        return count

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        registering = self.sequence_parallel.shared.registering
        with nullcontext() if is_prepared(self) else registering(self.model):
            return super()._prepare_for_training(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Train with attention that exchanges heads, also in the recomputation of the backward pass."""
        with self.sequence_parallel.shared.running():
            return super().training_step(*args, **kwargs)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return this rank's share of the mean over all labelled tokens of the optimizer step, over all ranks."""
        run = self.sequence_parallel
        if not run.shared.active:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        shard = self._shard(inputs)
        # A Trainer with its own loss may call this without the number.
        tokens = run.step_tokens if num_items_in_batch is None else num_items_in_batch
        if shard.labelled is None or tokens is None:
            rule = "batches need labels, whose number weights the losses of shards"
            fix = "copy input_ids and mask what is not trained, or use a layout other than sp for this trainer"
            raise UsageError(ConfigError(where="labels", rule=rule, fix=fix))
        own = {SHIFT_LABELS: shard.labels(shifts=False), LABELS: shard.labels(shifts=run.extends_logits)}
        result: Any = super().compute_loss(model, shard.inputs | own, return_outputs=return_outputs)
        if not run.is_connected:
            run.shared.check_exchanges(self.model)
            run.is_connected = True
        loss, outputs = result if isinstance(result, tuple) else (result, None)
        loss = self._share(loss, shard.labelled, tokens)
        return (loss, outputs) if return_outputs else loss

    def _share(self, loss: torch.Tensor, labelled: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Weight a shard's loss by its tokens, and undo the engine's reduction of gradients over ranks.

        The mean over all ranks of the returned training losses is the mean over tokens, which the Trainer logs. The
        gradients must be those of that mean too, so engines that add over the ranks of a sequence get a loss whose
        gradient is `size` times smaller. Evaluation returns the mean over the sequences that the ranks share.
        """
        import torch
        import torch.distributed as dist

        run = self.sequence_parallel
        weight = labelled if run.loss_reduction == "mean" else (labelled > 0)
        total = loss.float() * weight
        if not self.model.training:
            sums = torch.stack([total.detach(), labelled.to(total)])
            dist.all_reduce(sums, group=run.shared.group)
            return sums[0] / sums[1].clamp(min=1)
        tokens = tokens.to(loss.device).clamp(min=1)
        value = total * dist.get_world_size() / tokens
        zero = self.accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
        if not gradients_are_added_over_a_sequence(zero):
            return value
        graded = value / run.shared.size
        return graded + (value - graded).detach()

    def _cut(self, batch: dict[str, Any]) -> Shard:
        shared, pad = self.sequence_parallel.shared, getattr(self.processing_class, "pad_token_id", None)
        return cut(batch, ranks=shared.size, rank=shared.rank, pad_token_id=pad or 0)

    def _shard(self, inputs: dict[str, Any]) -> Shard:
        run = self.sequence_parallel
        shard = Shard.of_batch(inputs) or self._cut(inputs)
        run.shared.position_ids = shard.inputs["position_ids"]
        run.whole_tokens = shard.whole_tokens
        run.labelled = shard.labelled
        return shard

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Evaluate on shards, and join the logits if they are returned."""
        run = self.sequence_parallel
        with run.shared.running():
            if any(inputs.get(name) is None for name in self.label_names):
                _check_samples([inputs], self.model.config._attn_implementation)
                inputs = self._shard(self._prepare_inputs(inputs)).inputs
            loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if logits is not None:
            logits = joined(logits, run.shared, whole_tokens=run.whole_tokens)
        return loss, logits, labels

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate, and gather results from one rank of each sequence."""
        with _gathering_once(self.accelerator, self.sequence_parallel.shared):
            return super().evaluation_loop(*args, **kwargs)


def _check_samples(batches: list[Any], attention: str) -> None:
    errors = attention_errors(attention=attention, mask_dimensions=mask_dimensions(batches))
    if not errors:
        left_padded, packed = padding_and_packing(batches)
        samples = max((len(example_of(batch)) for batch in batches), default=1)
        errors = sample_errors(left_padded=left_padded, packed=packed, attention=attention, samples=samples)
    if errors:
        raise UsageError(errors)


def _equal_batches(batches: Iterator[Any], shared: SharedSequence, device: Any) -> Iterator[Any]:
    """Yield the batches of the first rank of a sequence on all of its ranks.

    They already agree, unless a collator draws random numbers in a worker process of the data loader, which the Trainer
    seeds by rank. Only batches that differ are sent.
    """
    import torch
    import torch.distributed as dist

    source = dist.get_global_rank(shared.group, 0)
    for batch in batches:
        # Preference pairs, for example, have no sequence per row.
        if not hasattr(batch, "get") or all(batch.get(name) is None for name in ("input_ids", "inputs_embeds")):
            keys = ", ".join(map(str, batch)) if hasattr(batch, "get") else type(batch).__name__
            rule, fix = "must have input_ids, which sequence parallelism shards", "use a layout other than sp"
            raise UsageError(ConfigError(where="batches", value=keys, rule=rule, fix=f"{fix} for this trainer"))
        own = torch.tensor([digest_of(batch)], device=device)
        digests = [torch.empty_like(own) for _ in range(shared.size)]
        dist.all_gather(digests, own, group=shared.group)
        for name in sorted(batch) if len(set(torch.cat(digests).tolist())) > 1 else ():
            value = batch[name]
            if torch.is_tensor(value):
                shape = torch.tensor(value.shape, device=device)
                dist.broadcast(shape, source, group=shared.group)
                sent = value.new_empty(shape.tolist(), device=device) if tuple(shape.tolist()) != value.shape else value
                sent = sent.to(device).contiguous()
                dist.broadcast(sent, source, group=shared.group)
                batch[name] = sent.to(value.device)
        yield batch


@contextmanager
def _gathering_once(accelerator: Any, shared: SharedSequence) -> Iterator[None]:
    """Make `accelerator.gather` collect from the ranks that hold the same shard, inside the block."""
    import torch
    import torch.distributed as dist
    from accelerate.utils import recursively_apply

    def gather_tensor(tensor: torch.Tensor) -> torch.Tensor:
        own = tensor[None].contiguous() if tensor.dim() == 0 else tensor.contiguous()
        parts = [torch.empty_like(own) for _ in range(shared.data_ranks)]
        dist.all_gather(parts, own, group=shared.data_group)
        return torch.cat(parts)

    def gather(data: Any) -> Any:
        return recursively_apply(gather_tensor, data, error_on_other_type=True)

    with patches.applied("sequence-parallel-gather", lambda _: gather, on=accelerator):
        yield
