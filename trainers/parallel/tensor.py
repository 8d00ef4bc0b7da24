"""Trainer callback for tensor parallelism: DeepSpeed AutoTP shards every layer over a group of ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from ...ds_configs.legality.axes import tensor_parallel_errors
from ...ds_configs.specs.errors import ConfigError, UsageError
from ...ds_configs.specs.layout import Layout
from ...plugins.accelerate import gathered_once
from ...plugins.deepspeed.auto_tp import (
    align_random_state,
    allow_frozen_norms,
    forget_tensor_parallel,
    gather_heads_for_losses,
    keep_whole_attention,
    layers_without_rule,
    seed_workers_by_group,
    tensor_parallel_section,
    unpartitioned_layers,
)
from ...plugins.deepspeed.engine import accept_train_batch_size, train_batch_size
from ...plugins.launching.messages import note_on_first_rank
from ...plugins.transformers.training_arguments import deepspeed_configuration, trainer_errors
from ..exact import Axis, ExactTrainer, check_attached, count_as_one_process
from .sequence import reading_errors, traits_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer, TrainerControl, TrainerState, TrainingArguments

_WHERE = "tensor_parallel_size"
_SECTION_KEYS = frozenset({"autotp_size", "vocab_parallel_lm_head", "partition_config", "dtype", "keep_module_on_host"})


def layout_errors(model: PreTrainedModel, arguments: TrainingArguments) -> list[ConfigError]:
    """Return why AutoTP cannot shard a loaded model under these training arguments."""
    errors: list[ConfigError] = []

    def reject(where: str, value: object, rule: str, fix: str) -> None:
        errors.append(ConfigError(where=where, value=value, rule=rule, fix=fix))

    kind = type(model).__name__
    if (tp := getattr(arguments.parallelism_config, "tp_size", 1)) > 1:
        rule = "selects Transformers' own tensor parallelism, which cannot be combined with AutoTP"
        reject("parallelism_config.tp_size", tp, rule, "omit it")
    if (getattr(model, "_tp_size", None) or 1) > 1:
        rule = "was sharded by Transformers when it was loaded"
        reject("model", kind, rule, "load it without distributed_config")
    if getattr(model, "hf_quantizer", None) is not None:
        reject("model", kind, "is quantized, and AutoTP cannot shard packed weights", "load it in its own precision")
    if getattr(model, "ds_autotp_parsed", False):
        rule = "was sharded in an earlier run, possibly with another tensor_parallel_size"
        reject("model", kind, rule, "load the model again")
    errors += reading_errors(arguments)
    if getattr(arguments, "precompute_ref_log_probs", False):
        rule = "reads different samples on the ranks of a group, because it runs before the groups exist"
        reject("precompute_ref_log_probs", True, rule, "omit it")
    configuration = deepspeed_configuration(arguments) or {}
    for section in ("bf16", "fp16"):
        if getattr(arguments, section) and section not in configuration:
            rule = "is missing from the DeepSpeed configuration, so AutoTP would shard the model in another precision"
            reject(section, None, rule, f'write "{section}": {{"enabled": "auto"}}')
    return errors


def section_errors(section: Mapping[str, Any], required: Mapping[str, object]) -> list[ConfigError]:
    """Return where the user's `tensor_parallel` section contradicts the required one."""
    errors = []
    for key, value in section.items():
        where = f"tensor_parallel.{key}"
        if key in ("tp", "tensor_parallel"):
            size = value.get("tp_size", required["autotp_size"]) if isinstance(value, Mapping) else value
            if size not in (1, required["autotp_size"]):
                rule = f"contradicts TensorParallelCallback({required['autotp_size']})"
                errors.append(ConfigError(where=f"{where}.tp_size", value=size, rule=rule, fix="use the same size"))
        elif key not in _SECTION_KEYS:
            rule = "changes how AutoTP shards layers; equal losses are not verified with it"
            errors.append(ConfigError(where=where, value=value, rule=rule, fix="omit it"))
        # AutoTP treats a missing key and null as its own choice.
        elif (key in required or key == "partition_config") and value not in (required.get(key), None):
            rule = f"contradicts the callback, which requires {required.get(key)!r}"
            errors.append(ConfigError(where=where, value=value, rule=rule, fix="change one of them, or omit the key"))
    return errors


class TensorParallelCallback(TrainerCallback):
    """Shard attention heads, MLPs and the output head over the ranks of a group, with ZeRO 0 to 2 between groups.

    Ranks `k * size ... (k + 1) * size - 1` form a group and read the same samples; `per_device_train_batch_size` is the
    batch size of a group. The loss counts every token of the global batch once. Checkpoints are normal Hugging Face
    checkpoints.

    >>> callback = TensorParallelCallback(2)  # doctest: +SKIP
    >>> callback.prepare(arguments, model)  # doctest: +SKIP
    >>> trainer = Trainer(model, arguments, train_dataset=samples)  # doctest: +SKIP
    >>> callback.attach(trainer)  # doctest: +SKIP

    Args:
        tensor_parallel_size: Number of ranks that share each layer; keep a group within a node.

    Raises:
        UsageError: the size is below 1.
    """

    def __init__(self, tensor_parallel_size: int) -> None:
        if tensor_parallel_size < 1:
            raise UsageError(
                ConfigError(where=_WHERE, value=tensor_parallel_size, rule="must be at least 1", fix="use 2")
            )
        self.tensor_parallel_size = tensor_parallel_size
        self._prepared: TrainingArguments | None = None
        self._trainer: Any = None

    def prepare(self, training_arguments: TrainingArguments, model: PreTrainedModel) -> None:
        """Check the model and the layout, and write the `tensor_parallel` section.

        Call it before the Trainer is created.

        Raises:
            UsageError: a rule is broken, or the DeepSpeed configuration contradicts the callback; lists all errors.
        """
        size = self.tensor_parallel_size
        if size == 1:
            self._prepared = training_arguments
            return
        configuration = deepspeed_configuration(training_arguments)
        zero = (configuration or {}).get("zero_optimization", {})
        experts = (configuration or {}).get("expert_parallel") or {}
        axes = training_arguments.parallelism_config
        errors = tensor_parallel_errors(
            replace(traits_of(model, size), model_type=model.config.model_type),
            Layout(
                engine="ddp" if configuration is None else "deepspeed",
                zero_stage=None if configuration is None else zero.get("stage", 0),
                tp=size,
                sp=getattr(axes, "sp_size", 1),
                cp=getattr(axes, "cp_size", 1),
                ep=int(experts.get("autoep_size", 1)) if experts.get("enabled") else 1,
            ),
            world_size=training_arguments.world_size,
            ranks_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", training_arguments.world_size)),
            method="lora" if hasattr(model, "peft_config") else "full",
            where=_WHERE,
        )
        errors += layout_errors(model, training_arguments)
        if errors := errors or layers_without_rule(model):
            raise UsageError(errors)
        assert configuration is not None, "a missing configuration is an error"
        section = configuration.get("tensor_parallel") or {}
        required = tensor_parallel_section(model, size)
        if errors := section_errors(section, required):
            raise UsageError(errors)
        configuration["tensor_parallel"] = {**section, **required}
        key = "stage3_gather_16bit_weights_on_model_save"
        if zero.get(key) is False:
            note_on_first_rank(f"zero_optimization.{key} is set to true, which saving sharded layers requires")
        configuration["zero_optimization"][key] = True
        forget_tensor_parallel()
        allow_frozen_norms()
        gather_heads_for_losses()
        keep_whole_attention(model)
        # Users write the true `train_batch_size`. DeepSpeed's engine multiplies by all ranks (deepspeed 0.19.8,
        # runtime/config.py), and so does Transformers.
        if isinstance(configuration.get("train_batch_size"), int):
            true_size = train_batch_size(training_arguments, size=size)
            accept_train_batch_size(training_arguments, size=size)
            if configuration["train_batch_size"] == true_size:
                configuration["train_batch_size"] = true_size * size
        self._prepared = training_arguments

    def attach(self, trainer: Trainer) -> None:
        """Make a Trainer read data, count tokens and gather predictions by group.

        Call it right after the Trainer is created.

        Raises:
            UsageError: `prepare` was not called with the Trainer's arguments, or the Trainer's settings would give the
                ranks of a group different batches; lists all errors.
        """
        if self._prepared is not trainer.args:
            rule = "was not called with the arguments of this Trainer"
            fix = "call callback.prepare(training_arguments, model) before the Trainer is created"
            raise UsageError(ConfigError(where="TensorParallelCallback.prepare", rule=rule, fix=fix))
        self._trainer = trainer
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        size = self.tensor_parallel_size
        if size == 1:
            return
        errors = trainer_errors(trainer)
        if hasattr(trainer, "_forward_redirection"):
            # DeepSpeed compares the arguments of the first forward pass between ranks (deepspeed 0.19.8, trl 1.16.0).
            rule = "passes functions to the forward pass of the model, which DeepSpeed cannot compare between ranks"
            fix = "use ZeRO or FSDP2, or shardwright.trainers.DistillationTrainer"
            errors.append(ConfigError(where="trainer", value=type(trainer).__name__, rule=rule, fix=fix))
        if errors:
            raise UsageError(errors)
        # Dispatching from the first rank would give every group the same batch.
        trainer.accelerator.dataloader_config.dispatch_batches = False
        count_as_one_process(trainer, TensorAxis(size))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Check before the first step that every layer was sharded as planned.

        Raises:
            UsageError: `attach` was not called, or AutoTP did not shard some layers.
        """
        check_attached(self, self._trainer)
        if self.tensor_parallel_size == 1:
            return
        errors = trainer_errors(self._trainer)
        errors += unpartitioned_layers(self._trainer.model, self.tensor_parallel_size)
        if errors:
            raise UsageError(errors)
        align_random_state(args.device)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Align the random states of a group, so that its ranks shuffle alike and draw the same dropout masks.

        Saving and evaluating can advance the random state of one rank alone.
        """
        if self.tensor_parallel_size > 1:
            align_random_state(args.device)

    on_epoch_begin = on_step_begin


class TensorAxis(Axis):
    """Makes the ranks of a group read the same samples."""

    def seed_workers(self, trainer: ExactTrainer, loader: Any) -> None:
        """Seed data workers by group."""
        seed_workers_by_group(trainer, loader, self.ranks_of_a_sample)

    def evaluating(self, trainer: ExactTrainer) -> AbstractContextManager[Any]:
        """Gather results from one rank of each group."""
        from deepspeed.utils import groups

        return gathered_once(trainer.accelerator, groups.get_data_parallel_group)
