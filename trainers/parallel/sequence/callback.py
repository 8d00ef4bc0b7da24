"""Trainer callback for Ulysses sequence parallelism: ranks share the sequences of a causal language model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from transformers import TrainerCallback

from ....ds_configs.legality.axes import attention_errors, sample_errors
from ....ds_configs.specs.errors import ConfigError, UsageError
from ....ds_configs.specs.layout import Engine
from ....plugins.accelerate.repeated_samples import gathered_once
from ....plugins.deepspeed.engine import accept_train_batch_size
from ....plugins.deepspeed.ulysses import (
    SharedSequence,
    forget_sequence_parallelism,
    gradients_are_added_over_a_sequence,
)
from ....plugins.transformers.output_heads import base_model
from ....plugins.transformers.run_settings import trainer_errors
from ...counting.own_losses import computes_own_loss, requested_kind
from ...data.chat import IGNORED_LABEL
from ...exact import Axis, ExactTrainer, check_attached, count_as_one_process
from .checks import argument_errors, model_errors
from .shards import (
    LABELS,
    SHIFT_LABELS,
    UNSHARDED_TOKENS,
    cut,
    digest_of,
    example_of,
    joined,
    labelled_tokens,
    loss_labels,
    mask_dimensions,
    padding_and_packing,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, TrainerControl, TrainerState, TrainingArguments

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
        loss_shifts_labels: Whether the Trainer's own loss (`compute_loss` of a subclass, or `compute_loss_func`) itself
            drops the first label and the last logit, as the losses of Transformers do. It then gets one more label and
            logit than the shard has tokens, so that no label is lost between shards. With `False` it gets labels that
            are aligned with the logits. The loss is a mean over the labelled tokens of its samples; set the attribute
            `own_loss = "sum"` of the Trainer or its class for a sum.

    Example:
        >>> callback = SequenceParallelCallback(2)
        >>> callback.prepare(arguments, model)
        >>> trainer = Trainer(model=model, args=arguments, train_dataset=dataset)
        >>> callback.attach(trainer)
        >>> trainer.train()
    """

    def __init__(self, sequence_parallel_size: int, *, loss_shifts_labels: bool = True) -> None:
        if sequence_parallel_size < 1:
            rule = "must be a positive number of ranks"
            raise UsageError(ConfigError(where="sequence_parallel_size", value=sequence_parallel_size, rule=rule))
        self.sequence_parallel_size = sequence_parallel_size
        self.loss_shifts_labels = loss_shifts_labels
        self._trainer: Any = None

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
        if errors:
            raise UsageError(errors)
        if size > 1:
            forget_sequence_parallelism()
            accept_train_batch_size(training_arguments, size=size)
            training_arguments.parallelism_config = parallelism_config(size, world_size, attention=attention)

    def attach(self, trainer: Any) -> None:
        """Give a Trainer the axis of sequences; call it right after the Trainer is created.

        Raises:
            UsageError: `prepare` was not called with this Trainer's arguments, or the Trainer's class runs sequence
                parallelism itself.
        """
        size = self.sequence_parallel_size
        if size > 1:
            axes = trainer.accelerator.parallelism_config
            if axes is None or axes.sp_size != size:
                rule = "callback.prepare(training_arguments, model) was not called before the Trainer was created"
                fix = "call it with the Trainer's arguments"
                raise UsageError(ConfigError(where="SequenceParallelCallback", rule=rule, fix=fix))
            if isinstance(getattr(trainer, "shared_axis", None), SequenceAxis):
                rule = "callback.attach(trainer) was called already"
                raise UsageError(ConfigError(where="SequenceParallelCallback", rule=rule, fix="call it once"))
            if getattr(trainer, "shares_sequences", False):
                rule = "runs sequence parallelism itself, with TrainingArguments.parallelism_config"
                fix = "omit the callback, or plan without sp"
                raise UsageError(ConfigError(where="trainer", value=type(trainer).__name__, rule=rule, fix=fix))
            if errors := trainer_errors(trainer):
                raise UsageError(errors)
            own_loss = requested_kind(trainer)
            if own_loss == "sample_mean":
                rule = "is not supported by ranks that share samples"
                raise UsageError(ConfigError(where="own_loss", value=own_loss, rule=rule, fix="use a mean over labels"))
            axis = SequenceAxis(
                SharedSequence(size),
                is_sum=own_loss == "sum",
                loss_shifts_labels=self.loss_shifts_labels,
                has_own_loss=computes_own_loss(trainer),
            )
            _share_sequences(trainer, axis)
            if trainer.compute_loss_func is not None and own_loss != "sum":
                trainer.compute_loss_func = axis.mean_over_shard(trainer.compute_loss_func)
            count_as_one_process(trainer, axis)
        self._trainer = trainer
        if not any(callback is self for callback in trainer.callback_handler.callbacks):
            trainer.add_callback(self)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Check that `attach` was called.

        Raises:
            UsageError: `attach` was not called.
        """
        check_attached(self, self._trainer)


def parallelism_config(size: int, world_size: int, *, attention: str) -> Any:
    """Return Accelerate's configuration of Ulysses; the other ranks become `dp_shard`."""
    from accelerate import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation=attention)
    return ParallelismConfig(
        sp_size=size, sp_backend="deepspeed", dp_shard_size=world_size // size, dp_replicate_size=1, sp_handler=handler
    )


def _share_sequences(trainer: Any, axis: SequenceAxis) -> None:
    """Let all ranks of a sequence read the same batches, and give a loss that drops a logit one more."""
    import torch.distributed as dist
    from accelerate import ParallelismConfig
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.functional import pad

    class HiddenFromTheTrainer(ParallelismConfig):
        """Reports no sequence parallelism to transformers 5.17.0 (trainer.py, `sp_enabled`).

        A Trainer that sees it would wrap the data loader and replace the loss. Accelerate 1.15.0 reads `sp_size`.
        """

        sp_enabled = False

    shared, accelerator = axis.shared, trainer.accelerator
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
    # The axis divides by the tokens of the step, whatever the class does with those of a micro-batch.
    trainer.model_accepts_loss_kwargs = trainer.loss_is_scaled_for_ga = True
    earlier = _LOGIT_HOOKS.pop(trainer.model, None)
    if earlier is not None:
        earlier.remove()
    if axis.extends_logits:

        def add_logit(_module: Any, _inputs: Any, outputs: Any) -> None:
            if shared.active and getattr(outputs, "logits", None) is not None:
                outputs["logits"] = pad(outputs.logits, (0, 0, 0, 1))

        _LOGIT_HOOKS[trainer.model] = trainer.model.register_forward_hook(add_logit)


class SequenceAxis(Axis):
    """All ranks of a sequence read the same batches, and each computes its own shard."""

    def __init__(
        self,
        shared: SharedSequence,
        *,
        is_sum: bool,
        loss_shifts_labels: bool,
        has_own_loss: bool,
    ) -> None:
        self.ranks_of_a_sample = shared.size
        self.shared = shared
        self._is_sum = is_sum
        self.extends_logits = has_own_loss and loss_shifts_labels
        """Whether logits get one more position, for a loss that drops the last one."""
        self._is_connected = False
        """Whether a forward pass has shown that attention exchanges heads in every layer."""
        self._whole_tokens = 0
        """Tokens of the batch that was sharded last."""
        self._labelled: torch.Tensor | None = None
        """Labelled tokens in this rank's shard of it."""
        self._step_tokens: torch.Tensor | None = None
        """Labelled tokens of all micro-batches of the optimizer step that was counted last."""
        self._loss_tokens: torch.Tensor | None = None
        """By how many the loss that is computed is divided; `None` for a loss of unsharded sequences."""

    def preparing(self, trainer: ExactTrainer) -> AbstractContextManager[Any]:
        """Register DeepSpeed's attention for the Trainer's model."""
        return self.shared.registering(trainer.model)

    def read(self, trainer: ExactTrainer, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of the first rank of a sequence on all of its ranks.

        They already agree, unless a collator draws random numbers in a worker process of the data loader, which the
        Trainer seeds by rank. Only batches that differ are sent.
        """
        import torch
        import torch.distributed as dist

        shared, device = self.shared, trainer.args.device
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
                    is_same = tuple(shape.tolist()) == value.shape
                    sent = value if is_same else value.new_empty(shape.tolist(), device=device)
                    sent = sent.to(device).contiguous()
                    dist.broadcast(sent, source, group=shared.group)
                    batch[name] = sent.to(value.device)
            yield batch

    def shards(self, trainer: ExactTrainer, batches: list[Any]) -> list[Any]:
        """Return this rank's shards of the micro-batches of a step; only shards reach the accelerator."""
        return [self._cut(trainer, batch) for batch in batches]

    def labels(self, trainer: ExactTrainer, batches: list[Any], device: Any, count: Callable[..., Any]) -> Any:
        """Return the labelled tokens of complete sequences, over all ranks."""
        _check_samples(batches, trainer.model.config._attn_implementation)
        tokens = labelled_tokens(batches)
        if tokens is not None:
            tokens = trainer.accelerator.gather(tokens.to(device)).sum() // self.shared.size
        self._step_tokens = tokens
        return tokens

    def running(self) -> AbstractContextManager[Any]:
        """Let attention exchange heads, also in the recomputation of the backward pass."""
        return self.shared.running()

    def loss_inputs(self, trainer: ExactTrainer, inputs: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return this rank's shard; the Trainer's loss is then a mean or a sum over it."""
        self._loss_tokens = None
        if not self.shared.active:
            return inputs, keywords
        shard, labels_BL = self._shard(trainer, inputs)
        items = keywords.pop("num_items_in_batch")
        # A Trainer with its own loss may call `compute_loss` without the number.
        self._loss_tokens = self._step_tokens if items is None else items
        if labels_BL is None or self._loss_tokens is None:
            rule = "batches need labels, whose number weights the losses of shards"
            fix = "copy input_ids and mask what is not trained, or use a layout other than sp for this trainer"
            raise UsageError(ConfigError(where="labels", rule=rule, fix=fix))
        labels = {SHIFT_LABELS: loss_labels(labels_BL, shifts=False)}
        return shard | labels | {LABELS: loss_labels(labels_BL, shifts=self.extends_logits)}, keywords

    def share_of_loss(self, trainer: ExactTrainer, result: Any) -> Any:
        """Weight a shard's loss by its tokens, and undo the engine's reduction of gradients over ranks.

        The mean over all ranks of the returned training losses is the mean over tokens, which the Trainer logs. The
        gradients must be those of that mean too, so engines that add over the ranks of a sequence get a loss whose
        gradient is `size` times smaller. Evaluation returns the mean over the sequences that the ranks share.
        """
        import torch
        import torch.distributed as dist

        if self._loss_tokens is None:
            return result
        if not self._is_connected:
            self.shared.check_exchanges(trainer.model)
            self._is_connected = True
        loss, outputs = result if isinstance(result, tuple) else (result, None)
        labelled: Any = self._labelled
        total = loss.float() * ((labelled > 0) if self._is_sum else labelled)
        if not trainer.model.training:
            sums = torch.stack([total.detach(), labelled.to(total)])
            dist.all_reduce(sums, group=self.shared.group)
            loss = sums[0] / sums[1].clamp(min=1)
        else:
            loss = total * dist.get_world_size() / self._loss_tokens.to(loss.device).clamp(min=1)
            zero = trainer.accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
            if gradients_are_added_over_a_sequence(zero):
                graded = loss / self.shared.size
                loss = graded + (loss - graded).detach()
        return (loss, outputs) if isinstance(result, tuple) else loss

    def mean_over_shard(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """Make a loss function that divides by `num_items_in_batch` return the mean over the labels of a shard."""

        def compute_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
            if self.shared.active and self._labelled is not None:
                num_items_in_batch = self._labelled.clamp(min=1)
            return compute(outputs, labels, num_items_in_batch=num_items_in_batch)

        return compute_loss

    def evaluating(self, trainer: ExactTrainer) -> AbstractContextManager[Any]:
        """Gather results from one rank of each sequence."""
        return gathered_once(trainer.accelerator, lambda: self.shared.data_group)

    def evaluated_inputs(self, trainer: ExactTrainer, inputs: Any) -> Any:
        """Return the shard of a batch without labels; those with labels are sharded when their loss is computed."""
        if all(inputs.get(name) is not None for name in trainer.label_names):
            return inputs
        _check_samples([inputs], trainer.model.config._attn_implementation)
        return self._shard(trainer, trainer._prepare_inputs(inputs))[0]

    def whole_logits(self, trainer: ExactTrainer, logits: Any) -> Any:
        """Join the logits of the shards."""
        return joined(logits, self.shared, whole_tokens=self._whole_tokens)

    def _cut(self, trainer: ExactTrainer, batch: dict[str, Any]) -> dict[str, Any]:
        pad = getattr(trainer.processing_class, "pad_token_id", None)
        return cut(batch, ranks=self.shared.size, rank=self.shared.rank, pad_token_id=pad or 0)

    def _shard(self, trainer: ExactTrainer, inputs: dict[str, Any]) -> tuple[dict[str, Any], torch.Tensor | None]:
        """Return the model's inputs on this rank, and the labels that they predict."""
        shard = dict(inputs) if UNSHARDED_TOKENS in inputs else self._cut(trainer, inputs)
        self.shared.position_ids, self._whole_tokens = shard["position_ids"], shard.pop(UNSHARDED_TOKENS)
        labels_BL = shard.pop(SHIFT_LABELS, None)
        self._labelled = None if labels_BL is None else labels_BL.ne(IGNORED_LABEL).sum()
        return shard, labels_BL


def _check_samples(batches: list[Any], attention: str) -> None:
    errors = attention_errors(attention=attention)
    if not errors:
        left_padded, packed = padding_and_packing(batches)
        samples = max((len(example_of(batch)) for batch in batches), default=1)
        masks = mask_dimensions(batches)
        errors = sample_errors(
            mask_dimensions=masks, left_padded=left_padded, packed=packed, attention=attention, samples=samples
        )
    if errors:
        raise UsageError(errors)
