"""Linear layers by the names of the checkpoint, where DeepSpeed has replaced, divided or distributed a model's modules.

Seen with deepspeed 0.19.8:

- AutoTP puts layers of its own in the place of linear ones, under their names. Each knows how its weight is cut:
  `gather_params` and `_tp_partition`, which are attributes of the parameter too, replace the data of whatever they get.
- AutoEP puts `router.gate`, a plain linear layer, where Transformers has a router that is none, and calls shared
  experts `shared_experts`.
- A stage of a pipeline is a numbered child of its module, with modules under the model's own names.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def named_linear_layers(model: Any) -> dict[str, Any]:
    """Return linear layers, whole or divided, by the names of their modules in the model's checkpoint.

    Args:
        model: As Transformers made it, or as an engine left it; of a pipeline the layers of this rank's stages.
    """
    import torch

    kinds = (torch.nn.Linear, *_divided_kinds())
    return {name: module for name, module in _named_modules(model) if isinstance(module, kinds)}


def whole_shape(layer: Any) -> tuple[int, int]:
    """Return output and input features of a linear layer over all ranks that hold a part of it."""
    rows, columns = getattr(layer, "_orig_weight_shape", None) or (layer.out_features, layer.in_features)
    return int(rows), int(columns)


def with_all_columns_and_rows(parameter: Any, own: Tensor) -> Tensor:
    """Return a matrix with the parts of all ranks of a tensor-parallel group, each of which must call it.

    Args:
        parameter: The parameter, which says how it is divided; one that is whole gives `own` back.
        own: This rank's part, of the parameter's shape.
    """
    gather = getattr(parameter, "gather_params", None)
    if gather is None:
        return own
    whole = own.detach()
    # The layer gives the list's entries other data, and the parameter keeps its own.
    gather([whole])
    return whole


def own_part(parameter: Any, whole: Tensor) -> Tensor:
    """Return this rank's part of a matrix [O, I] that is divided as a parameter is."""
    cut = getattr(parameter, "_tp_partition", None)
    if cut is None:
        return whole
    part = whole.detach()
    cut([part])
    return part


def stages_of(model: Any) -> Any:
    """Return the pipeline that a model is a part of, `None` for a whole model."""
    return model if hasattr(model, "stages") and hasattr(model, "data_parallel_rank") else None


def _named_modules(model: Any) -> Iterator[tuple[str, Any]]:
    if stages_of(model) is not None:
        for stage in model.stages:
            yield from _named_modules(stage)
        return
    from .auto_ep import moe_layers
    from .auto_ep_checkpoint import original_name

    blocks = moe_layers(model)
    for name, module in model.named_modules():
        plain = name.replace("_orig_mod.", "")
        block = next((prefix for prefix in blocks if name.startswith(f"{prefix}.")), None)
        if block is None:
            yield plain, module
        elif not name.startswith(f"{block}.router."):
            inside = original_name(blocks[block], f"{name[len(block) + 1 :]}.").removesuffix(".")
            yield f"{block}.{inside}".replace("_orig_mod.", ""), module


def _divided_kinds() -> tuple[type, ...]:
    # Whoever has divided layers has imported them.
    layers = sys.modules.get("deepspeed.module_inject.layers")
    if layers is None:
        return ()
    return (layers.LinearLayer, layers.LinearAllreduce, layers.SubParamLinearLayer, layers.SubParamLinearAllreduce)
