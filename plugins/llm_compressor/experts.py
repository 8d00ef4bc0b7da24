"""Mixtures of experts in checkpoints that llm-compressor writes (seen with 0.14.0.1 and transformers 5.17.0)."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ...ds_configs.errors import Fault
from ...ds_configs.quantization.layers import LinearLayer, selected_layers
from ...ds_configs.quantization.scheme import QuantizationScheme
from ...ds_configs.quantization.sizes import TensorShape

_EXPERT_WEIGHT = re.compile(r"(.+\.experts\.\d+\.\w+)\.weight")
_ROUTER_NAMES = ("gate", "router", "shared_expert_gate")


def expert_layers(tensors: Mapping[str, TensorShape], *, known: Collection[str]) -> tuple[LinearLayer, ...]:
    """Return the matrices of experts, one by one, by their names in a checkpoint."""
    layers = []
    for name, (shape, _) in tensors.items():
        match = _EXPERT_WEIGHT.fullmatch(name)
        if match and len(shape) == 2 and match[1] not in known:
            layers.append(
                LinearLayer(name=match[1], out_features=shape[0], in_features=shape[1], is_expert=True),
            )
    return tuple(layers)


def expert_faults(scheme: QuantizationScheme, method: str, layers: Sequence[LinearLayer]) -> list[Fault]:
    """Return why the experts of a mixture cannot be quantized so that Transformers loads them.

    transformers 5.17.0, `integrations/compressed_tensors.py`: weights of experts are decompressed without
    `weight_zero_point`, and loading fails with a RuntimeError.
    """
    experts = [layer for layer in selected_layers(scheme, layers) if layer.is_expert]
    if not experts or scheme.weights.symmetric or scheme.storage != "compressed-tensors":
        return []
    rule = f"{len(experts)} matrices of experts would have zero points, which Transformers 5.17 cannot load"
    return [Fault(where="scheme", value=scheme.name, rule=rule, fix="use a symmetric scheme such as W4A16")]


def router_patterns(meta: Any) -> tuple[str, ...]:
    """Return the linear layers that choose experts: a rounded router sends tokens elsewhere."""
    import torch

    return tuple(
        name
        for name, module in meta.named_modules()
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in _ROUTER_NAMES
    )
