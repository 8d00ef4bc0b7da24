"""Torch context parallelism under FSDP2 through the Trainer: checks, Accelerate's configuration, batches that fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...ds_configs.errors import Fault, UsageError
from ...ds_configs.parallelism.context import context_parallel_faults
from ...plugins.accelerate import engine_from_environment
from ...plugins.ring_attention_cpu import enable_cpu_ring_attention
from .checks import attention_window, base_model, parallelism_faults, rotation
from .shards import ATTENTION_MASK, mask_dimensions, padding_and_packing

_FILLS = {"labels": -100, "shift_labels": -100}


def prepare_context_parallel(training_arguments: Any, model: Any, context_parallel_size: int) -> None:
    """Check everything and tell Accelerate; call it before the Trainer is made.

    Raises:
        UsageError: model or arguments forbid it; all faults at once.
    """
    import torch
    from accelerate import ParallelismConfig
    from accelerate.utils import TorchContextParallelConfig

    size, world_size = context_parallel_size, training_arguments.world_size
    faults = _model_faults(training_arguments, model, size)
    faults += parallelism_faults(training_arguments, {"sp": 1, "cp": size, "tp": 1})
    if faults:
        raise UsageError(faults)
    if size == 1:
        return
    if not torch.accelerator.is_available():
        enable_cpu_ring_attention()
    training_arguments.parallelism_config = ParallelismConfig(
        cp_size=size, dp_shard_size=world_size // size, cp_handler=TorchContextParallelConfig()
    )


class ContextParallelCollator:
    """A data collator whose batches are padded on the right to a multiple of twice the ranks of a sequence.

    The mask is left out: attention is causal, and padding on the right is behind every token.

    Raises:
        UsageError: a batch is padded on the left, packs documents into a row, or has a mask of more dimensions.
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
        batch.pop(ATTENTION_MASK, None)
        batch.pop("position_ids", None)
        samples, tokens = batch["input_ids"].shape
        extra = -tokens % (2 * self.context_parallel_size)
        fills = {"input_ids": self.pad_token_id, **_FILLS}
        for name, value in batch.items():
            if torch.is_tensor(value) and value.shape == (samples, tokens):
                batch[name] = torch.nn.functional.pad(value, (0, extra), value=fills.get(name, 0))
        return batch


def _model_faults(arguments: Any, model: Any, size: int) -> list[Fault]:
    inner = base_model(model)
    text = inner.config.get_text_config()
    if getattr(arguments, "deepspeed_plugin", None) is not None:
        engine = "deepspeed"
    else:
        engine = "fsdp2" if arguments.fsdp or engine_from_environment() == "fsdp2" else "DDP"
    return context_parallel_faults(
        context_parallel_size=size,
        engine=engine,
        world_size=arguments.world_size,
        attention=inner.config._attn_implementation,
        model_type=text.model_type,
        layer_types=tuple(getattr(text, "layer_types", None) or ()),
        attention_window_tokens=attention_window(text),
        rope_type=rotation(text),
    )
