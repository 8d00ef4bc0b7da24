"""Ulysses sequence parallelism for the Trainer: ranks share the sequences of a causal language model.

Shapes: B samples, S tokens, P tokens padded to a multiple of the ranks, L = P / ranks, V vocabulary.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary
from zlib import crc32

from transformers import TrainerCallback

from ...ds_configs.legality.axes import (
    LENGTH_DEPENDENT_ROTATIONS,
    UNSHAREABLE_MODELS,
    WITHOUT_MASK,
    attention_errors,
    sample_errors,
    sequence_parallel_errors,
)
from ...ds_configs.specs.errors import ConfigError, UsageError
from ...ds_configs.specs.layout import Engine, Layout
from ...ds_configs.specs.model import ModelTraits, equal_head_widths
from ...plugins.accelerate import gathered_once
from ...plugins.deepspeed.engine import accept_train_batch_size, train_batch_size
from ...plugins.deepspeed.ulysses import (
    SharedSequence,
    forget_sequence_parallelism,
    gradients_are_added_over_a_sequence,
    sequence_group,
)
from ...plugins.transformers.output_heads import accepts_shifted_labels, base_model
from ...plugins.transformers.training_arguments import deepspeed_configuration, trainer_errors
from ..counting.counts import computes_own_loss, labelled_tokens, requested_kind, shifted_labels
from ..data.chat import IGNORED_LABEL
from ..exact import Axis, ExactTrainer, check_attached, count_as_one_process

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, TrainerControl, TrainerState, TrainingArguments

LABELS, SHIFT_LABELS, POSITION_IDS, ATTENTION_MASK = "labels", "shift_labels", "position_ids", "attention_mask"
UNSHARDED_TOKENS = "unsharded_tokens"
"""Entry of a batch that is a shard: S, before padding."""
_FLASH_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Document borders of an unsharded row, as flash kernels take them; the kernels derive the same from positions."""
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
            from accelerate import ParallelismConfig
            from accelerate.utils import DeepSpeedSequenceParallelConfig

            forget_sequence_parallelism()
            accept_train_batch_size(training_arguments, size=size)
            # The other ranks become `dp_shard`.
            training_arguments.parallelism_config = ParallelismConfig(
                sp_size=size,
                sp_backend="deepspeed",
                dp_shard_size=world_size // size,
                dp_replicate_size=1,
                sp_handler=DeepSpeedSequenceParallelConfig(
                    sp_seq_length_is_variable=True, sp_attn_implementation=attention
                ),
            )

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
            axis.share_batches(trainer)
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
        super().__init__(shared.size)
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

    def share_batches(self, trainer: Any) -> None:
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

        shared, accelerator = self.shared, trainer.accelerator
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
        if self.extends_logits:

            def add_logit(_module: Any, _inputs: Any, outputs: Any) -> None:
                if shared.active and getattr(outputs, "logits", None) is not None:
                    outputs["logits"] = pad(outputs.logits, (0, 0, 0, 1))

            _LOGIT_HOOKS[trainer.model] = trainer.model.register_forward_hook(add_logit)

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

        group, device = sequence_group(), trainer.args.device
        source = dist.get_global_rank(group, 0)
        for batch in batches:
            # Preference pairs, for example, have no sequence per row.
            if not hasattr(batch, "get") or all(batch.get(name) is None for name in ("input_ids", "inputs_embeds")):
                keys = ", ".join(map(str, batch)) if hasattr(batch, "get") else type(batch).__name__
                rule, fix = "must have input_ids, which sequence parallelism shards", "use a layout other than sp"
                raise UsageError(ConfigError(where="batches", value=keys, rule=rule, fix=f"{fix} for this trainer"))
            own = torch.tensor([digest_of(batch)], device=device)
            digests = [torch.empty_like(own) for _ in range(self.shared.size)]
            dist.all_gather(digests, own, group=group)
            for name in sorted(batch) if len(set(torch.cat(digests).tolist())) > 1 else ():
                value = batch[name]
                if torch.is_tensor(value):
                    shape = torch.tensor(value.shape, device=device)
                    dist.broadcast(shape, source, group=group)
                    is_same = tuple(shape.tolist()) == value.shape
                    sent = value if is_same else value.new_empty(shape.tolist(), device=device)
                    sent = sent.to(device).contiguous()
                    dist.broadcast(sent, source, group=group)
                    batch[name] = sent.to(value.device)
            yield batch

    def shards(self, trainer: ExactTrainer, batches: list[Any]) -> list[Any]:
        """Return this rank's shards of the micro-batches of a step; only shards reach the accelerator."""
        return [self._cut(trainer, batch) for batch in batches]

    def labels(self, trainer: ExactTrainer, batches: list[Any], device: Any, count: Callable[..., Any]) -> Any:
        """Return the labelled tokens of complete sequences, over all ranks."""
        check_samples(batches, attention=trainer.model.config._attn_implementation)
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
            dist.all_reduce(sums, group=sequence_group())
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
        check_samples([inputs], attention=trainer.model.config._attn_implementation)
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


def check_samples(batches: Sequence[Mapping[str, Any]], *, attention: str = "") -> None:
    """Check that ranks can share the sequences of batches; `attention` is empty for context parallelism.

    Raises:
        UsageError: a batch is padded on the left, packs documents into a row that attention does not separate, or has a
            mask with more than 2 dimensions.
    """
    errors = attention_errors(attention=attention) if attention else []
    if not errors:
        left_padded, packed = padding_and_packing(batches)
        masks = [batch[ATTENTION_MASK] for batch in batches if batch.get(ATTENTION_MASK) is not None]
        errors = sample_errors(
            mask_dimensions=max([2, *(mask.dim() if hasattr(mask, "dim") else 4 for mask in masks)]),
            left_padded=left_padded,
            packed=packed,
            attention=attention,
            samples=max((len(example_of(batch)) for batch in batches), default=1),
        )
    if errors:
        raise UsageError(errors)


def traits_of(model: PreTrainedModel, size: int) -> ModelTraits:
    """Return what the rules of axes read of a loaded model.

    `size` replaces sizes that its configuration lacks: models without attention have no heads, and their own rule.
    """
    config = base_model(model).config
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None) or size
    window = getattr(text, "sliding_window", None) or getattr(text, "attention_chunk_size", None)
    attends_to_all = getattr(text, "use_sliding_window", True) is False or not isinstance(window, int)
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    sections = [rope, *(section for section in rope.values() if isinstance(section, dict))]
    rotations = [str(section.get("rope_type", section.get("type", ""))) for section in sections]
    return ModelTraits(
        model_type=text.model_type,
        num_attention_heads=heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        intermediate_size=getattr(text, "intermediate_size", None) or size,
        vocab_size=text.vocab_size,
        num_experts=getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None) or 0,
        attention=config._attn_implementation,
        layer_types=tuple(getattr(text, "layer_types", None) or ()),
        attention_window_tokens=None if attends_to_all else window,
        has_equal_head_widths=equal_head_widths(text.to_dict()),
        # If layers differ, one that does not work on shards.
        rope_type=max(rotations, key=LENGTH_DEPENDENT_ROTATIONS.__contains__),
    )


def model_errors(
    model: PreTrainedModel, *, size: int, world_size: int, engine: Engine = "deepspeed"
) -> list[ConfigError]:
    """Return why a model cannot be trained on shards of its sequences."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    inner = base_model(model)
    config = inner.config
    text = config.get_text_config()
    flash, sdpa = getattr(inner, "_supports_flash_attn", True), getattr(inner, "_supports_sdpa", True)
    errors = sequence_parallel_errors(
        traits_of(model, size),
        Layout(engine=engine, sp=size),
        world_size=world_size,
        offered_attention=tuple(name for name in WITHOUT_MASK if (sdpa if name == "sdpa" else flash)),
    )
    name = type(inner).__name__
    if text.model_type in UNSHAREABLE_MODELS:
        return errors
    # DeepSpeed registers its attention in the registry of Transformers.
    files = {type(module).__module__ for module in inner.modules()}
    registries = [getattr(sys.modules.get(file), "ALL_ATTENTION_FUNCTIONS", None) for file in files]
    used = [registry for registry in registries if registry is not None]
    if not used or any(registry is not ALL_ATTENTION_FUNCTIONS for registry in used):
        rule = "does not use Transformers' registry of attention functions, where heads are exchanged"
        errors.append(ConfigError(where="model", value=name, rule=rule, fix="use sequence_parallel_size = 1"))
    if any(hasattr(module, "sinks") for module in inner.modules()):
        rule = "has an attention sink per head, and the exchange of heads does not move it to the other ranks"
        errors.append(ConfigError(where="model", value=name, rule=rule, fix="use sequence_parallel_size = 1"))
    if not accepts_shifted_labels(inner):
        rule = "must be a causal language model whose loss takes shift_labels"
        errors.append(ConfigError(where="model", value=name, rule=rule, fix="use an AutoModelForCausalLM model"))
    elif any(getattr(module, "is_causal", True) is False for module in inner.modules()):
        rule = "attends to both sides, so without a mask it would attend to padding on the right"
        errors.append(ConfigError(where="model", value=name, rule=rule, fix="use a decoder (is_decoder=True)"))
    if hasattr(config, "vision_config") or hasattr(config, "audio_config"):
        rule = "places images or sounds among its tokens, which cannot be split into shards"
        errors.append(ConfigError(where="model", value=name, rule=rule, fix="train its text model"))
    if any(getattr(peft, "is_prompt_learning", False) for peft in getattr(model, "peft_config", {}).values()):
        rule = "adds virtual tokens to the start of every shard"
        errors.append(ConfigError(where="peft", value="prompt learning", rule=rule, fix="use LoRA"))
    return errors


def argument_errors(arguments: TrainingArguments, *, size: int, attention: str = "sdpa") -> list[ConfigError]:
    """Return what in `TrainingArguments` and the DeepSpeed section contradicts sequence parallelism.

    `attention` is the model's attention implementation.
    """
    errors = []
    rejected = {
        "average_tokens_across_devices": (False, "losses are means over the tokens of all ranks", "omit it"),
        "train_sampling_strategy": (
            "batch_rebalance",
            "gives different samples to the ranks of a sequence, which need the same samples",
            "use random",
        ),
        "eval_use_gather_object": (True, "gathers from every rank of a sequence", "omit it"),
        "predict_with_generate": (True, "generates from complete prompts", "call model.generate on each rank"),
    }
    for name, (value, rule, fix) in rejected.items():
        if getattr(arguments, name, None) == value:
            errors.append(ConfigError(where=f"training arguments: {name}", value=value, rule=rule, fix=fix))
    errors += reading_errors(arguments)
    configuration = deepspeed_configuration(arguments) or {}
    section_size = configuration.get("sequence_parallel_size", size)
    if section_size != size:
        rule = f"contradicts sequence_parallel_size = {size} of the callback"
        errors.append(ConfigError(where="sequence_parallel_size", value=section_size, rule=rule, fix="omit the key"))
    tensor = (configuration.get("tensor_parallel") or {}).get("autotp_size", 1)
    if tensor > 1:
        where, rule = "tensor_parallel.autotp_size", "cannot be combined with sequence parallelism"
        errors.append(ConfigError(where=where, value=tensor, rule=rule, fix="omit the section"))
    zero = configuration.get("zero_optimization") or {}
    if zero.get("stage", 0) == 3 and zero.get("reduce_scatter", True) is False:
        where = "zero_optimization.reduce_scatter"
        rule = "adds gradients of some parameters over a sequence and averages those of others (deepspeed 0.19.8)"
        errors.append(ConfigError(where=where, value=False, rule=rule, fix="omit the key"))
    total, right = configuration.get("train_batch_size", "auto"), train_batch_size(arguments, size=size)
    # TrainingArguments has replaced "auto" by the product with all ranks.
    filled = right * size if getattr(arguments, "hf_deepspeed_config", None) is not None else right
    if total not in ("auto", right, filled):
        rule = f"must be micro-batch * accumulation * ranks / sp = {right}"
        errors.append(ConfigError(where="train_batch_size", value=total, rule=rule, fix=f"write {right} or 'auto'"))
    handler = getattr(getattr(arguments, "parallelism_config", None), "sp_handler", None)
    if getattr(handler, "sp_seq_length_is_variable", True) is False:
        rule = "fixes the length of batches, which the callback pads"
        errors.append(ConfigError(where="sp_handler.sp_seq_length_is_variable", value=False, rule=rule, fix="omit it"))
    handler_attention = getattr(handler, "sp_attn_implementation", None)
    if handler_attention not in (None, attention):
        where, rule = "sp_handler.sp_attn_implementation", f"contradicts the model, which was loaded with {attention!r}"
        errors.append(ConfigError(where=where, value=handler_attention, rule=rule, fix="omit it"))
    return errors + parallelism_errors(arguments, {"sp": size, "cp": 1, "tp": 1, "dp_replicate": 1})


def reading_errors(arguments: TrainingArguments) -> list[ConfigError]:
    """Return what in `TrainingArguments` does not combine with ranks that read the same batches and share them."""
    errors = []
    rejected = {
        "split_batches": "splits a batch over all ranks, but ranks that share samples need the same batch",
        "dispatch_batches": "sends different batches from the first rank, but ranks that share samples need the same",
    }
    for name, rule in rejected.items():
        if getattr(arguments.accelerator_config, name, None):
            errors.append(ConfigError(where=f"accelerator_config.{name}", value=True, rule=rule, fix="omit it"))
    noise = getattr(arguments, "neftune_noise_alpha", None)
    if noise is not None:
        rule = "scales noise by the length that a rank embeds, which differs from that of the padded batch"
        errors.append(ConfigError(where="neftune_noise_alpha", value=noise, rule=rule, fix="omit it"))
    return errors


def parallelism_errors(arguments: TrainingArguments, required: dict[str, int]) -> list[ConfigError]:
    """Return where `parallelism_config`, or the launcher's environment, sets other sizes than the required ones."""
    axes = getattr(arguments, "parallelism_config", None)
    sizes = {}
    if axes is not None:
        sizes = {name: getattr(axes, f"{name}_size", 1) for name in required}
    elif os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() in ("1", "true", "yes", "on"):
        sizes = {name: int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", "1")) for name in required}
    return [
        ConfigError(
            where=f"parallelism_config.{name}_size",
            value=size,
            rule=f"contradicts the requested size {required[name]}",
            fix=f"write {required[name]}, or omit parallelism_config",
        )
        for name, size in sizes.items()
        if size != required[name]
    ]


def loss_labels(shift_labels_BL: torch.Tensor, *, shifts: bool) -> torch.Tensor:
    """Return labels for a loss: [B, L], or [B, 1 + L] for one that drops the first label and the last logit itself.

    A shard without labels gets one label, so that its mean is finite; its weight is 0.
    """
    import torch

    labels_BL, has_labels = shift_labels_BL.clone(), shift_labels_BL.ne(IGNORED_LABEL).any()
    labels_BL[0, 0] = torch.where(has_labels, labels_BL[0, 0], torch.zeros_like(labels_BL[0, 0]))
    return torch.nn.functional.pad(labels_BL, (1, 0), value=IGNORED_LABEL) if shifts else labels_BL


def example_of(batch: Mapping[str, Any]) -> torch.Tensor:
    """Return the input tensor of a batch, [B, S] or [B, S, hidden]."""
    example: torch.Tensor = batch["input_ids"] if batch.get("input_ids") is not None else batch["inputs_embeds"]
    return example


def cut(batch: Mapping[str, Any], *, ranks: int, rank: int, pad_token_id: int = 0) -> dict[str, Any]:
    """Return the shard of a batch that belongs to `rank`, padded on the right to a multiple of `ranks`.

    Tensors [B, S, ...] are split along the sequence; others are copied. The mask is dropped: attention is causal, and
    padding on the right comes after every token. Document borders are dropped too: flash kernels derive them from
    positions. `position_ids` [B, L] count from the start of the unsharded sequence. `shift_labels` [B, L], if there are
    labels, has the label of the token that each position predicts, also across shard borders.

    Raises:
        UsageError: document borders are passed without positions.
    """
    import torch

    if any(name in batch for name in _FLASH_BOUNDARIES) and batch.get(POSITION_IDS) is None:
        rule = "counts tokens of unsharded rows; shards find documents by position_ids only"
        raise UsageError(ConfigError(where="cu_seq_lens", rule=rule, fix="let the collator return position_ids"))
    example = example_of(batch)
    samples, tokens = example.shape[:2]
    length = -(-tokens // ranks)
    extra = length * ranks - tokens
    dropped = (LABELS, SHIFT_LABELS, ATTENTION_MASK, *_FLASH_BOUNDARIES)
    whole = {name: value for name, value in batch.items() if name not in dropped}
    if whole.get(POSITION_IDS) is None:
        whole[POSITION_IDS] = torch.arange(tokens, device=example.device).expand(samples, -1)
    labels_BS = shifted_labels(batch)
    if labels_BS is not None:
        whole[SHIFT_LABELS] = labels_BS
    fills = {"input_ids": pad_token_id, SHIFT_LABELS: IGNORED_LABEL}
    shard: dict[str, Any] = {UNSHARDED_TOKENS: tokens}
    for name, value in whole.items():
        if not torch.is_tensor(value) or value.shape[:2] != (samples, tokens):
            shard[name] = value
            continue
        if extra:
            last = value[:, -1:] + torch.arange(1, extra + 1, device=value.device) if name == POSITION_IDS else None
            padding = value.new_full((samples, extra, *value.shape[2:]), fills.get(name, 0)) if last is None else last
            value = torch.cat([value, padding], dim=1)
        shard[name] = value[:, rank * length : (rank + 1) * length].contiguous()
    return shard


def digest_of(batch: Mapping[str, Any]) -> int:
    """Return a number that two batches share only if their tensors are equal, but for a collision of CRC-32."""
    import torch

    digest = 0
    for name in sorted(batch):
        if torch.is_tensor(value := batch[name]):
            head = f"{name} {value.dtype} {list(value.shape)}".encode()
            content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            digest = crc32(content, crc32(head, digest))
    return digest


def padding_and_packing(batches: Sequence[Mapping[str, Any]]) -> tuple[bool, bool]:
    """Return whether any batch is padded on the left, and whether any packs documents into a row.

    Positions of padding are ignored: their values depend on the collator.
    """
    import torch

    left, packed = [], []
    for batch in batches:
        mask, positions = batch.get(ATTENTION_MASK), batch.get(POSITION_IDS)
        mask = mask if mask is not None and mask.dim() == 2 else None
        if mask is not None:
            left.append((mask[:, 1:] > mask[:, :-1]).any() & (mask <= 1).all())
            packed.append((mask > 1).any())
        if positions is not None and positions.dim() == 2:
            restarts = positions[:, 1:] != positions[:, :-1] + 1
            packed.append((restarts if mask is None else restarts & mask[:, 1:].bool() & mask[:, :-1].bool()).any())
    if not left and not packed:
        return False, False
    device = (left or packed)[0].device
    never = torch.zeros((), dtype=torch.bool, device=device)
    is_left_padded, is_packed = torch.stack([torch.stack([never, *flags]).any() for flags in (left, packed)]).tolist()
    return is_left_padded, is_packed


def joined(value: Any, shared: SharedSequence, *, whole_tokens: int) -> Any:
    """Return the shards of all ranks of a sequence, concatenated along the sequence and without padding.

    Raises:
        UsageError: the second dimension of a tensor is not the sequence.
    """
    import torch
    import torch.distributed as dist

    if isinstance(value, Mapping):
        return type(value)(  # type: ignore[call-arg]
            {name: joined(item, shared, whole_tokens=whole_tokens) for name, item in value.items()}
        )
    if isinstance(value, list | tuple):
        return type(value)(joined(item, shared, whole_tokens=whole_tokens) for item in value)
    length = -(-whole_tokens // shared.size)
    if not torch.is_tensor(value) or value.dim() < 2 or value.shape[1] not in (length, length + 1):
        shape = list(value.shape) if torch.is_tensor(value) else type(value).__name__
        rule = f"an output of this shape cannot be joined along a sequence of {length} tokens per rank"
        fix = "evaluate with prediction_loss_only=True, or name it in ignore_keys"
        raise UsageError(ConfigError(where="model outputs", value=shape, rule=rule, fix=fix))
    own = value[:, :length].contiguous()
    parts = [torch.empty_like(own) for _ in range(shared.size)]
    dist.all_gather(parts, own, group=sequence_group())
    return torch.cat(parts, dim=1)[:, :whole_tokens]
