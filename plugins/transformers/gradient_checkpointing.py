"""Gradient checkpointing of a model's first decoder layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...ds_configs.specs.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from torch import nn


def checkpoint_first_layers(model: nn.Module, count: int) -> int:
    """Recompute only the first `count` decoder layers of a model; return how many decoder layers it has.

    Call it after `gradient_checkpointing_enable`. It changes the longest stack of layers, or the last of equally long
    ones, which is the decoder. On a pipeline stage these are the stage's layers.

    Raises:
        UsageError: the model has no layers that Transformers can recompute, or checkpointing is off.
    """
    layers = decoder_layers(model)
    if not layers:
        rule, fix = "finds no layers to recompute", "use a model whose layers are GradientCheckpointingLayer"
        raise UsageError(ConfigError(where="checkpointed_layers", value=count, rule=rule, fix=fix))
    if not any(layer.gradient_checkpointing for layer in layers):
        rule = "needs gradient checkpointing, which is off"
        fix = "set gradient_checkpointing in TrainingArguments"
        raise UsageError(ConfigError(where="checkpointed_layers", value=count, rule=rule, fix=fix))
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index < count
    return len(layers)


def decoder_layers(model: nn.Module) -> list[Any]:
    """Return the layers of a model's longest stack of layers that can be recomputed, in order."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    longest: list[Any] = []
    for module in model.modules():
        stack = [layer for layer in module.children() if isinstance(layer, GradientCheckpointingLayer)]
        if stack and len(stack) >= len(longest):
            longest = stack
    return longest


def in_backward_pass() -> bool:
    """Return whether autograd is computing gradients on this thread, which includes the recomputation of checkpoints.

    torch 2.13 exposes the number of the graph task, inside which layers are recomputed, only under a private name.
    """
    import torch

    return bool(torch._C._current_graph_task_id() != -1)
