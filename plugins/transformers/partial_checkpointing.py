"""Gradient checkpointing of a model's first decoder layers alone, by the flag that each layer carries.

`Trainer` calls `gradient_checkpointing_enable` when training begins, and that sets the flag of every layer
(transformers 5.17.0, `modeling_layers.py`, `GradientCheckpointingLayer`). Each layer reads its own flag when it runs,
so taking it back from the later ones is enough, whatever wraps the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...ds_configs.specs.errors import Fault, UsageError

if TYPE_CHECKING:
    from torch import nn
    from transformers import TrainerCallback


def checkpoint_first_layers(model: nn.Module, count: int) -> int:
    """Let only the first `count` decoder layers of a model recompute their forward pass; return how many it has.

    Call it after `gradient_checkpointing_enable`. Of several stacks the one with most layers counts, of equally long
    ones the last, which is the decoder; the others stay as they are. On a pipeline stage these are its own layers.

    Raises:
        UsageError: the model has no layers that Transformers can recompute, or checkpointing is off.
    """
    layers = decoder_layers(model)
    if not layers:
        fix = "use a model whose layers are transformers' GradientCheckpointingLayer"
        raise UsageError(Fault(where="checkpointed_layers", value=count, rule="finds no layers to recompute", fix=fix))
    if not any(layer.gradient_checkpointing for layer in layers):
        rule = "needs gradient checkpointing, which is off"
        fix = "set gradient_checkpointing in TrainingArguments"
        raise UsageError(Fault(where="checkpointed_layers", value=count, rule=rule, fix=fix))
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index < count
    return len(layers)


def decoder_layers(model: nn.Module) -> list[Any]:
    """Return the layers of a model's longest stack that can be recomputed, in their order; none where it has none."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    longest: list[Any] = []
    for module in model.modules():
        stack = [layer for layer in module.children() if isinstance(layer, GradientCheckpointingLayer)]
        if stack and len(stack) >= len(longest):
            longest = stack
    return longest


def partial_checkpointing_callback(count: int) -> TrainerCallback:
    """Return a callback for the stock Trainer that recomputes only the first `count` layers once training begins."""
    from transformers import TrainerCallback

    class FirstLayersCallback(TrainerCallback):
        """Takes the flag back from the later layers, which the Trainer has just set."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            checkpoint_first_layers(kwargs["model"], count)

    return FirstLayersCallback()
