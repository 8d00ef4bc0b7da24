"""Gradient checkpointing of a model's first decoder layers, and checkpointing that keeps selected results."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from ...ds_configs.specs.errors import ConfigError, UsageError
from .. import patches

if TYPE_CHECKING:
    from torch import nn
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


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


def at_train_begin(change: Callable[[nn.Module], object]) -> TrainerCallback:
    """Return a callback for the stock Trainer that changes the model after the Trainer has enabled checkpointing."""
    from transformers import TrainerCallback

    class ChangeCallback(TrainerCallback):
        def on_train_begin(
            self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
        ) -> None:
            change(kwargs["model"])

    return ChangeCallback()


_ATTENTION = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")


@cache
def kept_operators() -> tuple[Any, ...]:
    """Return the operators whose results are kept: products with a weight, and fused attention.

    Batched products are excluded, because eager attention would keep its scores.
    """
    import torch

    aten = torch.ops.aten
    attention = [getattr(aten, f"_scaled_dot_product_{name}").default for name in _ATTENTION]
    return (aten.mm.default, aten.addmm.default, *attention)


def product_keeping_contexts() -> tuple[Any, Any]:
    """Return the contexts of a layer's forward pass and of its recomputation.

    torch 2.13.0 expects the recomputation to run the same operators as the forward pass, but ZeRO-3's hooks inside the
    layer gather differently ("aten.cat ... not found in storage"). So the contexts see only the kept operators.
    """
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    kept = kept_operators()
    first, again = create_selective_checkpoint_contexts(list(kept))
    kind = _mode_of_operators(kept)
    return kind(first), kind(again)


@cache
def _mode_of_operators(operators: tuple[Any, ...]) -> type:
    from torch.utils._python_dispatch import TorchDispatchMode

    class ModeOfOperators(TorchDispatchMode):
        """Passes some operators to another mode, and runs all others unchanged."""

        def __init__(self, inner: Any) -> None:
            super().__init__()
            self._inner = inner

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func not in operators:
                return func(*args, **(kwargs or {}))
            return self._inner.__torch_dispatch__(func, types, args, kwargs)

    return ModeOfOperators


def keep_products(model: nn.Module) -> int:
    """Keep products and attention of a model's recomputed layers; return how many decoder layers it has.

    Call it after `gradient_checkpointing_enable`; the flags that `checkpoint_first_layers` set are not changed.

    Raises:
        UsageError: the model has no layers that Transformers can recompute, or checkpointing is off.
    """
    from torch.utils.checkpoint import checkpoint

    layers = decoder_layers(model)
    if not any(layer.gradient_checkpointing for layer in layers):
        rule = "needs decoder layers with gradient checkpointing"
        fix = "set gradient_checkpointing in TrainingArguments, for a model of Transformers"
        raise UsageError(ConfigError(where="keeps_products", value=True, rule=rule, fix=fix))
    keeping = partial(checkpoint, use_reentrant=False, context_fn=product_keeping_contexts)
    for layer in layers:
        patches.assign("selective-checkpointing", keeping, on=layer)
    return len(layers)


def in_backward_pass() -> bool:
    """Return whether autograd is computing gradients on this thread, which includes the recomputation of checkpoints.

    torch 2.13 exposes the number of the graph task, inside which layers are recomputed, only under a private name.
    """
    import torch

    return bool(torch._C._current_graph_task_id() != -1)
