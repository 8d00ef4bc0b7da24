"""Gradient checkpointing that keeps the results of matrix products and attention, and recomputes the rest.

torch's selective checkpointing takes a `context_fn` beside `use_reentrant=False`. `gradient_checkpointing_kwargs` of
`TrainingArguments` would carry it to the layers, but reporters and `Trainer.save_model` write these arguments as JSON
(transformers 5.17.0, `TrainingArguments.to_json_string`), which has no functions. So each layer gets it after the
Trainer has enabled checkpointing, in the attribute that `GradientCheckpointingLayer` reads.
"""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any

from ...ds_configs.specs.errors import Fault, UsageError
from .partial_checkpointing import decoder_layers

if TYPE_CHECKING:
    from torch import nn
    from transformers import TrainerCallback

_ATTENTION = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")


@cache
def kept_operators() -> tuple[Any, ...]:
    """Return the operators whose results stay: products with a weight, and fused attention.

    Batched products are not among them: eager attention would keep its scores.
    """
    import torch

    aten = torch.ops.aten
    attention = [getattr(aten, f"_scaled_dot_product_{name}").default for name in _ATTENTION]
    return (aten.mm.default, aten.addmm.default, *attention)


def product_keeping_contexts() -> tuple[Any, Any]:
    """Return the contexts of a layer's forward pass and of its recomputation.

    torch 2.13.0 expects every operator of the first run again in the second, and ZeRO-3's hooks, which run inside the
    layer, gather otherwise there ("aten.cat ... not found in storage"). So its contexts see the kept operators alone.
    """
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    kept = kept_operators()
    first, again = create_selective_checkpoint_contexts(list(kept))
    return _seeing(kept)(first), _seeing(kept)(again)


@cache
def _seeing(operators: tuple[Any, ...]) -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seeing(TorchDispatchMode):
        """Passes some operators to another mode, and runs all others as they are."""

        def __init__(self, inner: Any) -> None:
            super().__init__()
            self._inner = inner

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func not in operators:
                return func(*args, **(kwargs or {}))
            return self._inner.__torch_dispatch__(func, types, args, kwargs)

    return Seeing


def keep_products(model: nn.Module) -> int:
    """Let the recomputed layers of a model keep their products and attention; return how many layers it has.

    Call it after `gradient_checkpointing_enable`; the layers are those of `checkpoint_first_layers`, whose flags stay.

    Raises:
        UsageError: the model has no layers that Transformers can recompute, or checkpointing is off.
    """
    from torch.utils.checkpoint import checkpoint

    layers = decoder_layers(model)
    if not any(layer.gradient_checkpointing for layer in layers):
        rule = "needs decoder layers with gradient checkpointing"
        fix = "set gradient_checkpointing in TrainingArguments, for a model of Transformers"
        raise UsageError(Fault(where="keeps_products", value=True, rule=rule, fix=fix))
    keeping = partial(checkpoint, use_reentrant=False, context_fn=product_keeping_contexts)
    for layer in layers:
        layer._gradient_checkpointing_func = keeping
    return len(layers)


def selective_checkpointing_callback() -> TrainerCallback:
    """Return a callback for the stock Trainer whose recomputed layers keep their products once training begins."""
    from transformers import TrainerCallback

    class KeptProductsCallback(TrainerCallback):
        """Gives each layer its contexts, after the Trainer has enabled checkpointing."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            keep_products(kwargs["model"])

    return KeptProductsCallback()
