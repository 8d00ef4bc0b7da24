"""The callback that lets any Trainer of causal language models share sequences between ranks."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from transformers import TrainerCallback

from ....ds_configs.specs.errors import Fault, UsageError
from ....plugins.deepspeed.engine import accept_train_batch_size
from ....plugins.deepspeed.tiled_compute import share_tiled_mlps, tile_mlps, untile_mlps
from ....plugins.deepspeed.ulysses import SharedSequence, forget_sequence_parallelism
from ....plugins.transformers.run_settings import trainer_faults
from .checks import argument_faults, base_model, model_faults
from .tiling import TiledLoss, tile_count, tiling_faults
from .trainer_methods import LossReduction, SequenceParallelMethods, SequenceParallelRun

_LOGIT_HOOKS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""The hook that `attach` put on each model."""


class SequenceParallelCallback(TrainerCallback):
    """Trains and evaluates a causal language model whose sequences are shared by `sequence_parallel_size` ranks.

    Each rank holds a part of every sequence, and within attention a part of the heads instead (DeepSpeed Ulysses,
    arXiv 2309.14509, in the form of arXiv 2506.13996). Loss, gradients, clipping and evaluation are those of one
    process with the same global batch: the loss is the mean over the labelled tokens of the whole optimizer step. A
    mixture's load-balancing loss (`output_router_logits`) is that of each shard, weighed by its labelled tokens, and
    not that of whole sequences.

    Args:
        sequence_parallel_size: Ranks that share a sequence; consecutive ranks do.
        tiled_mlp: Compute MLPs in tiles of the sequence and recompute them in the backward pass; a number is how many
            tiles, `True` chooses `ceil(tokens of a rank / hidden size)`.
        tiled_loss: Compute logits and loss in tiles; a number is how many, `True` keeps a tile's logits under 1 GiB.
        loss_reduction: What the loss of the Trainer (a `compute_loss` of a subclass, `compute_loss_func`) is for the
            samples it is given: the mean over their labelled tokens, or the sum.
        loss_shifts_labels: Whether that loss drops the first label and the last logit itself, as the losses of
            Transformers do. It then gets a label and a logit more than the shard has tokens, so that none is lost
            between shards; `False` gives labels that stand beside the logits that predict them.

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
        loss_reduction: LossReduction = "mean",
        loss_shifts_labels: bool = True,
    ) -> None:
        if sequence_parallel_size < 1:
            rule = "must be a positive number of ranks"
            raise UsageError(Fault(where="sequence_parallel_size", value=sequence_parallel_size, rule=rule))
        if loss_reduction not in ("mean", "sum"):
            raise UsageError(Fault(where="loss_reduction", value=loss_reduction, rule="must be 'mean' or 'sum'"))
        self.sequence_parallel_size = sequence_parallel_size
        self.tiled_mlp, self.tiled_loss = tiled_mlp, tiled_loss
        self.loss_reduction: LossReduction = loss_reduction
        self.loss_shifts_labels = loss_shifts_labels
        self._attached = False

    def prepare(self, training_arguments: Any, model: Any) -> None:
        """Check everything and tell Accelerate; call it before the Trainer is made.

        Raises:
            UsageError: model, arguments or DeepSpeed section forbid it; all faults at once.
        """
        size, world_size = self.sequence_parallel_size, training_arguments.world_size
        engine = "deepspeed" if training_arguments.deepspeed_plugin is not None else "without DeepSpeed"
        faults = model_faults(model, size=size, world_size=world_size, engine=engine)
        if size > 1:
            attention = base_model(model).config._attn_implementation
            faults += argument_faults(training_arguments, size=size, attention=attention)
        faults += tiling_faults(
            model, training_arguments, size=size, tiled_mlp=self.tiled_mlp, tiled_loss=self.tiled_loss
        )
        if faults:
            raise UsageError(faults)
        if size > 1:
            forget_sequence_parallelism()
            accept_train_batch_size(training_arguments, size=size)
            training_arguments.parallelism_config = parallelism_config(size, world_size, attention=attention)

    def attach(self, trainer: Any) -> None:
        """Take over what only the Trainer's instance can change; call it right after the Trainer was made.

        Raises:
            UsageError: `prepare` was not called with this Trainer's arguments, or the Trainer shards by itself.
        """
        from transformers import Trainer

        size = self.sequence_parallel_size
        if size > 1:
            _check_trainer(trainer, size)
            if faults := trainer_faults(trainer):
                raise UsageError(faults)
            run = SequenceParallelRun(
                shared=SharedSequence(size),
                loss_reduction=self.loss_reduction,
                loss_shifts_labels=self.loss_shifts_labels,
                has_own_loss=type(trainer).compute_loss is not Trainer.compute_loss
                or trainer.compute_loss_func is not None
                or trainer.label_smoother is not None,
            )
            _take_over(trainer, run)
        else:
            run = None
        self._tile(trainer, run)
        self._attached = True
        if not any(callback is self for callback in trainer.callback_handler.callbacks):
            trainer.add_callback(self)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Refuse to train when `attach` was forgotten."""
        if not self._attached:
            rule = "callback.attach(trainer) was not called, so that sequences would not be shared"
            fix = "call it right after Trainer(...)"
            raise UsageError(Fault(where="SequenceParallelCallback", rule=rule, fix=fix))
        if self.tiled_mlp and model is not None:
            share_tiled_mlps(base_model(model))

    def _tile(self, trainer: Any, run: SequenceParallelRun | None) -> None:
        model = base_model(trainer.model)
        untile_mlps(model)
        if self.tiled_mlp:
            tile_mlps(model, tile_count(self.tiled_mlp))
        if self.tiled_loss and run is not None:
            if run.has_own_loss:
                rule = "computes the model's own loss, and the Trainer has another, which needs logits"
                raise UsageError(Fault(where="tiled_loss", value=self.tiled_loss, rule=rule, fix="leave it out"))
            run.tiled_loss = TiledLoss(trainer.model, self.tiled_loss)


def parallelism_config(size: int, world_size: int, *, attention: str) -> Any:
    """Return Accelerate's configuration of Ulysses; it takes the ranks that do not share a sequence from `dp_shard`."""
    from accelerate import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation=attention)
    return ParallelismConfig(
        sp_size=size, sp_backend="deepspeed", dp_shard_size=world_size // size, dp_replicate_size=1, sp_handler=handler
    )


def _check_trainer(trainer: Any, size: int) -> None:
    given = trainer.accelerator.parallelism_config
    if given is None or given.sp_size != size:
        rule = "callback.prepare(training_arguments, model) was not called before the Trainer was made"
        raise UsageError(Fault(where="SequenceParallelCallback", rule=rule, fix="call it with the Trainer's arguments"))
    if isinstance(trainer, SequenceParallelMethods):
        rule = "callback.attach(trainer) was called already"
        raise UsageError(Fault(where="SequenceParallelCallback", rule=rule, fix="call it once"))
    if getattr(trainer, "shares_sequences", False):
        rule = "shares sequences by itself, with TrainingArguments.parallelism_config"
        raise UsageError(Fault(where="trainer", value=type(trainer).__name__, rule=rule, fix="leave the callback out"))


def _take_over(trainer: Any, run: SequenceParallelRun) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    shared, accelerator = run.shared, trainer.accelerator
    own = type(trainer)
    # Streams would be dispatched from the first rank, which Accelerate cannot do for ranks that share a batch.
    accelerator.dataloader_config.dispatch_batches = False
    # A Trainer with sequence parallelism of its own would wrap the data loader and replace the loss.
    accelerator.state.parallelism_config = _hidden(accelerator.parallelism_config)
    # Accelerate reads the same batches on all ranks of this dimension.
    shape = (dist.get_world_size() // shared.size, shared.size)
    accelerator.state.ds_device_mesh = init_device_mesh(accelerator.device.type, shape, mesh_dim_names=("dp", "tp"))
    trainer.model_accepts_loss_kwargs = True
    trainer.sequence_parallel = run
    trainer.__class__ = type(own.__name__, (SequenceParallelMethods, own), {"__module__": own.__module__})
    earlier = _LOGIT_HOOKS.pop(trainer.model, None)
    if earlier is not None:
        earlier.remove()
    if run.extends_logits:
        _LOGIT_HOOKS[trainer.model] = trainer.model.register_forward_hook(_one_more_logit(shared))


def _hidden(config: Any) -> Any:
    """Return a configuration by which Accelerate shares sequences and of which the Trainer sees nothing."""
    from accelerate import ParallelismConfig

    class HiddenFromTheTrainer(ParallelismConfig):
        """Says no where transformers 5.17.0 asks (trainer.py, `sp_enabled`); Accelerate 1.15.0 reads `sp_size`."""

        sp_enabled = False

    hidden = HiddenFromTheTrainer.__new__(HiddenFromTheTrainer)
    hidden.__dict__.update(config.__dict__)
    return hidden


def _one_more_logit(shared: SharedSequence) -> Any:
    from torch.nn.functional import pad

    def extend(_module: Any, _inputs: Any, outputs: Any) -> None:
        if shared.active and getattr(outputs, "logits", None) is not None:
            outputs["logits"] = pad(outputs.logits, (0, 0, 0, 1))

    return extend
