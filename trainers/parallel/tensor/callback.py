"""`TensorParallelCallback`: each layer divided over several ranks by DeepSpeed AutoTP, in any Trainer."""

from __future__ import annotations

import os
from typing import Any

from transformers import TrainerCallback

from ....ds_configs.legality.tensor import tensor_parallel_faults
from ....ds_configs.specs.errors import Fault, UsageError
from ....plugins.deepspeed.auto_tp import (
    align_random_state,
    forget_tensor_parallel,
    gather_vocabulary,
    keep_whole_attention,
    layers_without_rule,
    seed_workers_by_group,
    tensor_parallel_section,
    unpartitioned_layers,
)
from ....plugins.deepspeed.engine import accept_train_batch_size, train_batch_size
from ....plugins.deepspeed.tensor_parallel_batches import GroupsOnce
from ....plugins.launching.notes import note_on_first_rank
from ....plugins.transformers import run_settings
from ....plugins.transformers.training_arguments import deepspeed_configuration
from .checks import layout_faults, section_faults, tensor_trainer_faults

_WHERE = "tensor_parallel_size"


class TensorParallelCallback(TrainerCallback):
    """Divides attention heads, MLPs and the output head over the ranks of a group, with ZeRO 0 to 2 between groups.

    Ranks `k * size ... (k + 1) * size - 1` form a group and see the same samples; `per_device_train_batch_size` is that
    of a group. The loss counts every token of the global batch once. Checkpoints are normal ones of Hugging Face.

    >>> callback = TensorParallelCallback(2)  # doctest: +SKIP
    >>> callback.prepare(arguments, model)  # doctest: +SKIP
    >>> trainer = Trainer(model, arguments, train_dataset=samples)  # doctest: +SKIP
    >>> callback.attach(trainer)  # doctest: +SKIP

    Args:
        tensor_parallel_size: Ranks that share each layer; keep them within a node.
        vocabulary_parallel_head: Whether ranks keep the logits of their own part of the vocabulary, as the model's own
            loss allows. The token embedding of a tied head is divided with it.

    Raises:
        UsageError: the size is below 1.
    """

    def __init__(self, tensor_parallel_size: int, *, vocabulary_parallel_head: bool = False) -> None:
        if tensor_parallel_size < 1:
            raise UsageError(Fault(where=_WHERE, value=tensor_parallel_size, rule="must be at least 1", fix="use 2"))
        self.tensor_parallel_size = tensor_parallel_size
        self.vocabulary_parallel_head = vocabulary_parallel_head
        self._prepared: Any = None
        self._trainer: Any = None

    def prepare(self, training_arguments: Any, model: Any) -> None:
        """Check the model and the layout, and write the `tensor_parallel` section; call it before the Trainer is made.

        Raises:
            UsageError: a rule is broken, or the DeepSpeed configuration says otherwise; all faults at once.
        """
        if self.tensor_parallel_size == 1:
            self._prepared = training_arguments
            return
        configuration = deepspeed_configuration(training_arguments)
        text = model.config.get_text_config()
        zero = (configuration or {}).get("zero_optimization", {})
        parallelism = training_arguments.parallelism_config
        faults = tensor_parallel_faults(
            tensor_parallel_size=self.tensor_parallel_size,
            **self._sizes(text),
            model_type=model.config.model_type,
            num_experts=getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None) or 0,
            vocabulary_parallel_head=self.vocabulary_parallel_head,
            engine="other" if configuration is None else "deepspeed",
            zero_stage=None if configuration is None else zero.get("stage", 0),
            world_size=training_arguments.world_size,
            ranks_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", training_arguments.world_size)),
            method="lora" if hasattr(model, "peft_config") else "full",
            sequence_parallel_size=getattr(parallelism, "sp_size", 1),
            context_parallel_size=getattr(parallelism, "cp_size", 1),
            expert_parallel_size=_expert_parallel_size(configuration),
            where=_WHERE,
        )
        faults += layout_faults(model, parallelism, training_arguments, self.tensor_parallel_size)
        if faults := faults or layers_without_rule(model):
            raise UsageError(faults)
        assert configuration is not None, "a missing configuration is a fault"
        self._write_section(configuration, model, training_arguments)
        _accept_train_batch_size(configuration, training_arguments, self.tensor_parallel_size)
        self._prepared = training_arguments

    def _sizes(self, text: Any) -> dict[str, int]:
        """Return what must divide; a size that a configuration lacks is left to the rule of families."""
        heads = getattr(text, "num_attention_heads", None) or self.tensor_parallel_size
        return {
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
            "intermediate_size": getattr(text, "intermediate_size", None) or self.tensor_parallel_size,
            "vocab_size": text.vocab_size,
        }

    def _write_section(self, configuration: dict[str, Any], model: Any, training_arguments: Any) -> None:
        written = tensor_parallel_section(
            model, self.tensor_parallel_size, vocabulary_parallel_head=self.vocabulary_parallel_head
        )
        faults = section_faults(configuration.get("tensor_parallel") or {}, written)
        if faults:
            raise UsageError(faults)
        configuration["tensor_parallel"] = {**(configuration.get("tensor_parallel") or {}), **written}
        key = "stage3_gather_16bit_weights_on_model_save"
        zero = configuration["zero_optimization"]
        if zero.get(key) is False:
            note_on_first_rank(f"zero_optimization.{key} is now true, so that divided layers can be saved")
        zero[key] = True
        forget_tensor_parallel()
        keep_whole_attention(model)

    def attach(self, trainer: Any) -> None:
        """Take part in a Trainer, and give it data, metrics and predictions by groups; call it right after it was made.

        Raises:
            UsageError: `prepare` was not called with its arguments, or the Trainer is set up so that groups could not
                see the same batches; all faults at once.
        """
        if self._prepared is not trainer.args:
            rule = "was not called with the arguments of this Trainer"
            fix = "call callback.prepare(training_arguments, model) before the Trainer is made"
            raise UsageError(Fault(where="TensorParallelCallback.prepare", rule=rule, fix=fix))
        self._trainer = trainer
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        if self.tensor_parallel_size == 1:
            return
        faults = tensor_trainer_faults(trainer, vocabulary_parallel_head=self.vocabulary_parallel_head)
        faults += run_settings.trainer_faults(trainer)
        if faults:
            raise UsageError(faults)
        # Dispatching from the first rank would give every group the same batch.
        trainer.accelerator.dataloader_config.dispatch_batches = False
        seed_workers_by_group(trainer, self.tensor_parallel_size)
        once = GroupsOnce(trainer.accelerator)
        trainer.accelerator.gather_for_metrics = once
        trainer.gather_function = once
        if self.vocabulary_parallel_head:
            _gather_predictions(trainer)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make sure that every layer was divided as planned, before the first step.

        Raises:
            UsageError: `attach` was forgotten, or AutoTP left layers whole.
        """
        if self._trainer is None:
            rule, fix = "was not called", "call callback.attach(trainer) right after the Trainer is made"
            raise UsageError(Fault(where="TensorParallelCallback.attach", rule=rule, fix=fix))
        if self.tensor_parallel_size == 1:
            return
        faults = run_settings.trainer_faults(self._trainer)
        faults += unpartitioned_layers(self._trainer.model, self.tensor_parallel_size)
        if faults:
            raise UsageError(faults)
        align_random_state(args.device)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Shuffle alike within a group, whatever one rank drew besides."""
        if self.tensor_parallel_size > 1:
            align_random_state(args.device)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Draw the same dropout masks within a group, whatever one rank drew while saving or evaluating."""
        if self.tensor_parallel_size > 1:
            align_random_state(args.device)


def _accept_train_batch_size(configuration: dict[str, Any], training_arguments: Any, size: int) -> None:
    """Let a DeepSpeed section name its true `train_batch_size`, and hand on the one that DeepSpeed expects.

    Its engine (deepspeed 0.19.8, runtime/config.py) multiplies by all ranks, as Transformers does.
    """
    if isinstance(configuration.get("train_batch_size"), int):
        true = train_batch_size(training_arguments, size=size)
        accept_train_batch_size(training_arguments, size=size)
        if configuration["train_batch_size"] == true:
            configuration["train_batch_size"] = true * size


def _expert_parallel_size(configuration: dict[str, Any] | None) -> int:
    section = (configuration or {}).get("expert_parallel") or {}
    return int(section.get("autoep_size", 1)) if section.get("enabled") else 1


def _gather_predictions(trainer: Any) -> None:
    """Let `prediction_step` return the logits of the whole vocabulary."""
    step = trainer.prediction_step

    def prediction_step(*args: Any, **kwargs: Any) -> Any:
        loss, logits, labels = step(*args, **kwargs)
        if isinstance(logits, tuple):
            logits = (gather_vocabulary(logits[0]), *logits[1:])
        elif logits is not None:
            logits = gather_vocabulary(logits)
        return loss, logits, labels

    trainer.prediction_step = prediction_step
