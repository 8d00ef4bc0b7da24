"""Torch context parallelism under FSDP2 for the Trainer: checks, Accelerate's configuration and a padding collator."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from ...ds_configs.legality.axes import context_parallel_errors
from ...ds_configs.legality.trainer_parameters import parameter_errors
from ...ds_configs.specs.errors import ConfigError, UsageError
from ...ds_configs.specs.layout import Engine, Layout
from ...plugins.accelerate import enable_cpu_ring_attention, engine_from_environment
from ...plugins.transformers.output_heads import base_model
from ...plugins.transformers.training_arguments import own_class, trainer_errors
from ..counting.counts import UNPADDED
from ..exact import Axis, ExactTrainer, count_as_one_process
from .sequence import (
    ATTENTION_MASK,
    POSITION_IDS,
    check_samples,
    parallelism_errors,
    reading_errors,
    traits_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments

_EVALUATION = (
    "is wrong under context parallelism: each rank of a sequence counts as its own sample (transformers 5.17.0)"
)
_EVALUATE_ELSEWHERE = "evaluate the saved model with cp = 1, or use sp with DeepSpeed"
_FILLS = {"labels": -100, "shift_labels": -100}


class ContextParallelism:
    """Splits sequences over ranks that pass keys and values around in a ring.

    >>> ranks = ContextParallelism(4)  # doctest: +SKIP
    >>> ranks.prepare(arguments, model)  # doctest: +SKIP
    >>> trainer = Trainer(model, arguments, train_dataset=samples)  # doctest: +SKIP
    >>> ranks.attach(trainer)  # doctest: +SKIP

    Args:
        context_parallel_size: Number of ranks that share a sequence.
    """

    def __init__(self, context_parallel_size: int) -> None:
        self.context_parallel_size = context_parallel_size

    def prepare(self, training_arguments: TrainingArguments, model: PreTrainedModel) -> None:
        """Check the model and the layout, and configure Accelerate; call it before the Trainer is created.

        Raises:
            UsageError: model or arguments do not support it; lists all errors.
        """
        from accelerate import ParallelismConfig
        from accelerate.utils import TorchContextParallelConfig

        size, axes = self.context_parallel_size, training_arguments.parallelism_config
        # Replicas of the sharded model, from the arguments or from the launcher's environment.
        replicas = int(os.environ.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "1"))
        if axes is not None:
            replicas = int(getattr(axes, "dp_replicate_size", 1))
        shards = training_arguments.world_size // (size * replicas) if size > 0 else 1
        engine: Engine = "fsdp2" if training_arguments.fsdp or engine_from_environment() == "fsdp2" else "ddp"
        if getattr(training_arguments, "deepspeed_plugin", None) is not None:
            engine = "deepspeed"
        errors = context_parallel_errors(
            traits_of(model, size),
            Layout(engine=engine, cp=size, dp_replicate=replicas, dp_shard=shards),
            world_size=training_arguments.world_size,
            names_self_attention=any(name.endswith("self_attn") for name, _ in base_model(model).named_modules()),
        )
        errors += parallelism_errors(training_arguments, {"sp": 1, "cp": size, "tp": 1})
        if size > 1:
            rings = training_arguments.world_size // size
            if training_arguments.world_size % size == 0 and rings % replicas:
                rule = f"must divide world_size / cp = {rings}"
                errors.append(ConfigError(where="dp_replicate_size", value=replicas, rule=rule, fix="use 1"))
            errors += reading_errors(training_arguments)
            if training_arguments.average_tokens_across_devices is False:
                where, rule = "average_tokens_across_devices", "losses are means over the tokens of all ranks"
                errors.append(ConfigError(where=where, value=False, rule=rule, fix="omit it"))
            chosen = getattr(training_arguments, "eval_strategy", "no")
            if (when := str(getattr(chosen, "value", chosen))) != "no":
                errors.append(ConfigError(where="eval_strategy", value=when, rule=_EVALUATION, fix=_EVALUATE_ELSEWHERE))
        if errors:
            raise UsageError(errors)
        if size == 1:
            return
        if training_arguments.device.type == "cpu":
            enable_cpu_ring_attention()
        # Accelerate would send every rank another batch of a stream.
        training_arguments.accelerator_config.dispatch_batches = False
        training_arguments.parallelism_config = ParallelismConfig(
            cp_size=size,
            sp_size=1,
            tp_size=1,
            dp_replicate_size=replicas,
            dp_shard_size=shards,
            cp_handler=getattr(axes, "cp_handler", None) or TorchContextParallelConfig(),
        )

    def attach(self, trainer: Any) -> None:
        """Pad the batches of a Trainer, and make it reject evaluations; call it right after the Trainer is created.

        The shards of neighbouring ranks do not hold neighbouring tokens. Only the model's own loss is therefore right,
        whose labels Transformers shifts before it splits the sequence.

        Raises:
            UsageError: the Trainer has its own loss or metrics, or settings that do not combine; lists all errors.
        """
        from transformers import Trainer

        if self.context_parallel_size == 1:
            return
        named = [name for name in ("compute_loss_func", "compute_metrics") if getattr(trainer, name) is not None]
        errors = parameter_errors(named, ("cp",)) + trainer_errors(trainer)
        if own_class(trainer).compute_loss is not Trainer.compute_loss:
            where, rule = f"{type(trainer).__name__}.compute_loss", "computes a loss from shards that are not adjacent"
            errors.append(ConfigError(where=where, rule=rule, fix="use sp with DeepSpeed"))
        if errors:
            raise UsageError(errors)
        trainer.data_collator = ContextParallelCollator(trainer.data_collator, self.context_parallel_size)
        count_as_one_process(trainer, ContextAxis(self.context_parallel_size))


class ContextAxis(Axis):
    """Rejects evaluations, in which the Trainer counts the ranks of one sequence as separate samples."""

    def evaluating(self, trainer: ExactTrainer) -> NoReturn:
        """Raise an error.

        Raises:
            UsageError: always.
        """
        raise UsageError(ConfigError(where="evaluation", rule=_EVALUATION, fix=_EVALUATE_ELSEWHERE))


class ContextParallelCollator:
    """Data collator that pads batches on the right to a multiple of twice the number of ranks of a sequence.

    The mask is dropped: attention is causal, and padding on the right comes after every token. A batch also holds its
    number of tokens before padding (`counts.UNPADDED`), which the Trainer counts.

    Raises:
        UsageError: a batch is padded on the left, packs documents into a row, has a mask with more than 2 dimensions,
            or has positions that do not count its tokens from 0.
    """

    def __init__(self, collator: Callable[[Any], Any], context_parallel_size: int) -> None:
        self.collator, self.context_parallel_size = collator, context_parallel_size

    def __call__(self, rows: Any) -> dict[str, Any]:
        """Collate rows and pad them."""
        import torch

        batch = dict(self.collator(rows))
        check_samples([batch])
        samples, tokens = batch["input_ids"].shape
        mask = batch.pop(ATTENTION_MASK, None)
        # The Trainer creates the same positions for the padded length.
        positions = batch.pop(POSITION_IDS, None)
        if positions is not None:
            counts_tokens = positions.dim() == 2 and positions.shape[1] == tokens
            if counts_tokens:
                differs = positions != torch.arange(tokens, device=positions.device)
                # Collators give padding any position.
                counts_tokens = not bool((differs if mask is None else differs & mask.bool()).any())
            if not counts_tokens:
                rule = "must count the tokens of a row from 0: context parallelism does not support other positions"
                shape = list(positions.shape)
                raise UsageError(ConfigError(where=POSITION_IDS, value=shape, rule=rule, fix="omit them"))
        batch[UNPADDED] = (samples * tokens, samples * tokens if mask is None else int(mask.sum()))
        extra = -tokens % (2 * self.context_parallel_size)
        for name, value in batch.items():
            if torch.is_tensor(value) and value.shape == (samples, tokens):
                batch[name] = torch.nn.functional.pad(value, (0, extra), value=_FILLS.get(name, 0))
        return batch
