"""Mixtures of experts in checkpoints that llm-compressor writes (seen with 0.14.0.1 and transformers 5.17.0)."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...ds_configs.quantization.layers import LinearLayer
from ...ds_configs.quantization.scheme import QuantizationScheme
from ...ds_configs.quantization.sizes import TensorShape
from ...ds_configs.specs.errors import Fault
from ..safetensors.writing import rename_tensors

_EXPERT_WEIGHT = re.compile(r"(.+\.experts\.\d+\.\w+)\.weight")
_WRITTEN_EXPERT = re.compile(r"(.+\.experts\.\d+)\.(gate_proj|down_proj|up_proj)\.(\w+)")
_ROUTER_NAMES = ("gate", "router", "shared_expert_gate")
_MIXTRAL_NAMES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


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


def unloadable_expert_faults(scheme: QuantizationScheme, chosen: Sequence[LinearLayer]) -> list[Fault]:
    """Return why experts among the layers that a scheme selects cannot be quantized so that Transformers loads them.

    transformers 5.17.0, `integrations/compressed_tensors.py`: weights of experts are decompressed from `weight_packed`
    alone and without `weight_zero_point`; loading anything else fails with a RuntimeError.
    """
    experts = [layer for layer in chosen if layer.is_expert]
    if not experts or scheme.storage != "compressed-tensors":
        return []
    if not scheme.weights.symmetric:
        rule = f"{len(experts)} matrices of experts would have zero points, which Transformers 5.17 cannot load"
        return [Fault(where="scheme", value=scheme.name, rule=rule, fix="use a symmetric scheme such as W4A16")]
    if scheme.format == "int-quantized":
        rule = f"{len(experts)} matrices of experts would be stored as integers that Transformers 5.17 cannot load"
        fix = f"use W{scheme.weights.bits}A16, whose codes are packed"
        return [Fault(where="scheme", value=scheme.name, rule=rule, fix=fix)]
    return []


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


def restore_expert_names(directory: Path, source: Mapping[str, TensorShape]) -> int:
    """Give the experts of a written checkpoint the names that the original has, and return how many tensors changed.

    llmcompressor 0.14.0.1 writes the experts of Mixtral as `gate_proj`, `down_proj` and `up_proj`. Transformers 5.17.0
    and vLLM look for `w1`, `w2` and `w3`, find none, and Transformers runs with random experts after a mere warning.

    Args:
        directory: The checkpoint, changed in place.
        source: Tensors of the model that it was made from.
    """
    endings = {match[1].rpartition(".")[2] for match in map(_EXPERT_WEIGHT.fullmatch, source) if match}
    if endings != set(_MIXTRAL_NAMES.values()):
        return 0
    return rename_tensors(directory, _original_name)


def _original_name(name: str) -> str:
    match = _WRITTEN_EXPERT.fullmatch(name)
    return name if match is None else f"{match[1]}.{_MIXTRAL_NAMES[match[2]]}.{match[3]}"
