"""Torch context parallelism under FSDP2 through the Trainer: checks, Accelerate's configuration, batches that fit."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ....ds_configs.legality.context import context_parallel_faults
from ....ds_configs.legality.sequence import equal_head_widths
from ....ds_configs.specs.errors import Fault, UsageError
from ....plugins.accelerate.cpu_ranks import engine_from_environment
from ....plugins.accelerate.ring_attention_cpu import enable_cpu_ring_attention
from ..sequence.checks import attention_window, base_model, parallelism_faults, reading_faults, rotation
from ..sequence.shards import ATTENTION_MASK, POSITION_IDS, mask_dimensions, padding_and_packing

_EVALUATION = (
    "is wrong under context parallelism: ranks of a sequence count as samples of their own (transformers 5.17.0)"
)
_EVALUATE_ELSEWHERE = "evaluate the saved model with cp = 1, or use sp with DeepSpeed"
_FILLS = {"labels": -100, "shift_labels": -100}


def prepare_context_parallel(training_arguments: Any, model: Any, context_parallel_size: int) -> None:
    """Check everything and tell Accelerate; call it before the Trainer is made.

    Raises:
        UsageError: model or arguments forbid it; all faults at once.
    """
    from accelerate import ParallelismConfig
    from accelerate.utils import TorchContextParallelConfig

    size, given = context_parallel_size, training_arguments.parallelism_config
    replicas = _replicas(given)
    faults = _model_faults(training_arguments, model, size, replicas)
    faults += parallelism_faults(training_arguments, {"sp": 1, "cp": size, "tp": 1})
    if size > 1:
        faults += _argument_faults(training_arguments)
    if faults:
        raise UsageError(faults)
    if size == 1:
        return
    if training_arguments.device.type == "cpu":
        enable_cpu_ring_attention()
    # Accelerate would give every rank another batch of a stream.
    training_arguments.accelerator_config.dispatch_batches = False
    training_arguments.parallelism_config = ParallelismConfig(
        cp_size=size,
        sp_size=1,
        tp_size=1,
        dp_replicate_size=replicas,
        dp_shard_size=training_arguments.world_size // (size * replicas),
        cp_handler=getattr(given, "cp_handler", None) or TorchContextParallelConfig(),
    )


def check_context_parallel_trainer(trainer: Any) -> None:
    """Make sure that a Trainer does nothing that is wrong on parts of sequences, and let it refuse to evaluate.

    Call it right after the Trainer was made. The parts of ranks are no neighbouring tokens, so that only the model's
    own loss, whose labels Transformers shifts before it cuts, is right.

    Raises:
        UsageError: the Trainer has a loss of its own or metrics; all faults at once.
    """
    from transformers import Trainer

    name = type(trainer).__name__
    rule = "computes a loss from parts of sequences, whose labels cannot be shifted there"
    used = {
        "compute_loss_func": trainer.compute_loss_func is not None,
        f"{name}.compute_loss": type(trainer).compute_loss is not Trainer.compute_loss,
    }
    faults = [Fault(where=where, rule=rule, fix="use sp with DeepSpeed") for where, found in used.items() if found]
    if trainer.compute_metrics is not None:
        faults.append(Fault(where="compute_metrics", rule=_EVALUATION, fix=_EVALUATE_ELSEWHERE))
    if faults:
        raise UsageError(faults)
    trainer.evaluation_loop = _refuse_evaluation


def _refuse_evaluation(*_args: Any, **_kwargs: Any) -> None:
    raise UsageError(Fault(where="evaluation", rule=_EVALUATION, fix=_EVALUATE_ELSEWHERE))


class ContextParallelCollator:
    """A data collator whose batches are padded on the right to a multiple of twice the ranks of a sequence.

    The mask is left out: attention is causal, and padding on the right is behind every token.

    Raises:
        UsageError: a batch is padded on the left, packs documents into a row, has a mask of more dimensions, or has
            positions that do not count its tokens from 0.
    """

    def __init__(self, collator: Callable[[Any], Any], context_parallel_size: int, *, pad_token_id: int = 0) -> None:
        self.collator = collator
        self.context_parallel_size = context_parallel_size
        self.pad_token_id = pad_token_id

    def __call__(self, rows: Any) -> dict[str, Any]:
        """Collate rows and pad them."""
        import torch

        batch = dict(self.collator(rows))
        left_padded, packed = padding_and_packing([batch])
        faults = context_parallel_faults(
            context_parallel_size=self.context_parallel_size,
            engine="fsdp2",
            world_size=self.context_parallel_size,
            mask_dimensions=mask_dimensions([batch]),
            left_padded=left_padded,
            packed=packed,
        )
        if faults:
            raise UsageError(faults)
        _check_positions(batch)
        batch.pop(ATTENTION_MASK, None)
        # The Trainer makes the same ones of the padded length.
        batch.pop(POSITION_IDS, None)
        samples, tokens = batch["input_ids"].shape
        extra = -tokens % (2 * self.context_parallel_size)
        fills = {"input_ids": self.pad_token_id, **_FILLS}
        for name, value in batch.items():
            if torch.is_tensor(value) and value.shape == (samples, tokens):
                batch[name] = torch.nn.functional.pad(value, (0, extra), value=fills.get(name, 0))
        return batch


def _check_positions(batch: dict[str, Any]) -> None:
    import torch

    positions, mask = batch.get(POSITION_IDS), batch.get(ATTENTION_MASK)
    if positions is None:
        return
    counted = positions.dim() == 2 and positions.shape[1] == batch["input_ids"].shape[1]
    if counted:
        differs = positions != torch.arange(positions.shape[1], device=positions.device)
        # Collators put any position beside padding.
        counted = not bool((differs if mask is None else differs & mask.bool()).any())
    if not counted:
        rule = "must count the tokens of a row from 0: others are not handed on under context parallelism"
        raise UsageError(Fault(where=POSITION_IDS, value=list(positions.shape), rule=rule, fix="leave them out"))


def _replicas(given: Any) -> int:
    """Return the replicas of the sharded model that a configuration or else the launcher's environment asks for."""
    if given is not None:
        return int(getattr(given, "dp_replicate_size", 1))
    return int(os.environ.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "1"))


def _argument_faults(arguments: Any) -> list[Fault]:
    faults = reading_faults(arguments)
    if arguments.average_tokens_across_devices is False:
        rule, fix = "losses are means over the tokens of all ranks", "leave it out"
        faults.append(Fault(where="average_tokens_across_devices", value=False, rule=rule, fix=fix))
    if arguments.label_smoothing_factor > 0:
        rule = "shifts labels within parts of sequences that are no neighbours"
        smoothing, fix = arguments.label_smoothing_factor, "set it to 0, or use sp with DeepSpeed"
        faults.append(Fault(where="label_smoothing_factor", value=smoothing, rule=rule, fix=fix))
    chosen = getattr(arguments, "eval_strategy", "no")
    strategy = str(getattr(chosen, "value", chosen))
    if strategy != "no":
        faults.append(Fault(where="eval_strategy", value=strategy, rule=_EVALUATION, fix=_EVALUATE_ELSEWHERE))
    return faults


def _model_faults(arguments: Any, model: Any, size: int, replicas: int) -> list[Fault]:
    inner = base_model(model)
    text = inner.config.get_text_config()
    if getattr(arguments, "deepspeed_plugin", None) is not None:
        engine = "deepspeed"
    else:
        engine = "fsdp2" if arguments.fsdp or engine_from_environment() == "fsdp2" else "DDP"
    faults = context_parallel_faults(
        context_parallel_size=size,
        engine=engine,
        world_size=arguments.world_size,
        attention=inner.config._attn_implementation,
        model_type=text.model_type,
        layer_types=tuple(getattr(text, "layer_types", None) or ()),
        attention_window_tokens=attention_window(text),
        has_equal_head_widths=equal_head_widths(text.to_dict()),
        rope_type=rotation(text),
        dp_replicate=replicas,
        dp_shard=arguments.world_size // (size * replicas) if size > 0 else None,
        names_self_attention=any(name.endswith("self_attn") for name, _ in inner.named_modules()),
    )
    if size > 1 and arguments.world_size % size == 0 and arguments.world_size // size % replicas:
        rule = f"must divide the {arguments.world_size // size} ranks beside cp = {size}"
        faults.append(Fault(where="dp_replicate_size", value=replicas, rule=rule, fix="use 1"))
    return faults
