"""Experts and routers of mixtures as linear layers, by their names in checkpoints (seen with transformers 5.17.0)."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from ...ds_configs.quantization.layers import LinearLayer
from ...ds_configs.quantization.sizes import TensorShape

EXPERT_WEIGHT = re.compile(r"(.+\.experts\.\d+\.\w+)\.weight")
"""Name of the weight of one expert's matrix in a checkpoint."""
_ROUTER_NAMES = ("gate", "router", "shared_expert_gate")


def expert_layers(tensors: Mapping[str, TensorShape], *, known: Collection[str]) -> tuple[LinearLayer, ...]:
    """Return the matrices of experts, one by one, by their names in a checkpoint."""
    layers = []
    for name, (shape, _) in tensors.items():
        match = EXPERT_WEIGHT.fullmatch(name)
        if match and len(shape) == 2 and match[1] not in known:
            layers.append(
                LinearLayer(name=match[1], out_features=shape[0], in_features=shape[1], is_expert=True),
            )
    return tuple(layers)


def router_modules(model: Any) -> tuple[str, ...]:
    """Return the modules that choose experts and are no linear layers, as in Transformers 5; vLLM builds them as such.

    Loaders that make linear layers of them must find their names in `ignore`.
    """
    import torch

    return tuple(
        name
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in _ROUTER_NAMES
        and not isinstance(module, torch.nn.Linear)
        and isinstance(getattr(module, "weight", None), torch.nn.Parameter)
    )


def router_patterns(meta: Any) -> tuple[str, ...]:
    """Return the linear layers that choose experts: a rounded router sends tokens elsewhere."""
    import torch

    return tuple(
        name
        for name, module in meta.named_modules()
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in _ROUTER_NAMES
    )
