"""Storage of a mixture of experts that Transformers and vLLM load.

Seen with transformers 5.17.0 (`quantizers/quantizer_compressed_tensors.py`, `integrations/compressed_tensors.py`): the
experts of a compressed-tensors checkpoint are unpacked while it is loaded, and their inputs are never rounded.

    pack-quantized    loads, to the bit
    int-quantized     fails with a RuntimeError: only `weight_packed` is looked for
    left dense        found by no key, so that the model runs with random experts after a warning
    zero points       fails likewise, see `unloadable_expert_faults`

Schemes that round activations would be int-quantized. Their experts are therefore packed with the same weights and keep
their inputs in 16 bit, in a config group of their own, which vLLM reads by the name of a layer (`get_scheme_dict`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ..specs.errors import Fault
from .config_json import config_group, quantization_config
from .layers import LinearLayer, with_named_heads
from .scheme import QuantizationScheme

EXPERTS_TARGET = r"re:.*\.experts\.\d+\."
"""Every matrix of an expert, by the name that checkpoints have; the word is what Transformers looks for."""


def expert_scheme(scheme: QuantizationScheme) -> QuantizationScheme:
    """Return how the matrices of experts are stored: integers packed, with inputs in 16 bit; floats as the scheme says.

    >>> expert_scheme(scheme_named("W8A8")).format
    'pack-quantized'
    """
    return replace(scheme, activations=None) if _is_int_quantized(scheme) else scheme


def layer_scheme(scheme: QuantizationScheme, layer: LinearLayer) -> QuantizationScheme:
    """Return how one matrix is stored."""
    return expert_scheme(scheme) if layer.is_expert else scheme


def mixture_quantization_config(
    scheme: QuantizationScheme, layers: Iterable[LinearLayer], *, ignore: Sequence[str] | None = None
) -> dict[str, Any]:
    """Return what `config.json` states under `quantization_config` for a model with experts or without.

    Args:
        scheme: What is quantized, and how.
        layers: Matrices that are quantized.
        ignore: As for `quantization_config`.
    """
    chosen = tuple(layers)
    scheme = with_named_heads(scheme, chosen)
    found = quantization_config(scheme, ignore=ignore)
    if not _is_int_quantized(scheme) or not any(layer.is_expert for layer in chosen):
        return found
    experts = replace(expert_scheme(scheme), targets=(EXPERTS_TARGET,))
    groups = {"group_0": config_group(experts)}
    endings = sorted({layer.name.rpartition(".")[2] for layer in chosen if not layer.is_expert})
    if endings:
        # By name, since releases of vLLM took a group for `Linear` for that of the experts too.
        others = replace(scheme, targets=(rf"re:(?:.*\.)?(?:{'|'.join(endings)})$",))
        groups["group_1"] = config_group(others)
    return {**found, "format": "mixed-precision" if endings else experts.format, "config_groups": groups}


def mixture_remarks(scheme: QuantizationScheme, layers: Iterable[LinearLayer]) -> list[str]:
    """Return what a user must know of experts that are stored otherwise than the scheme says."""
    experts = sum(layer.is_expert for layer in layers)
    if not experts or not _is_int_quantized(scheme):
        return []
    kept = f"{experts} matrices of experts are packed with {scheme.weights.bits}-bit weights and keep 16-bit inputs"
    return [f"{kept}: Transformers 5.17 loads experts in no other form"]


def _is_int_quantized(scheme: QuantizationScheme) -> bool:
    return scheme.format == "int-quantized"


def unloadable_expert_faults(
    scheme: QuantizationScheme, chosen: Sequence[LinearLayer], layers: Sequence[LinearLayer]
) -> list[Fault]:
    """Return why experts cannot be stored as a scheme says so that Transformers loads them.

    transformers 5.17.0, `integrations/compressed_tensors.py`: weights of experts are decompressed from `weight_packed`
    alone and without `weight_zero_point`; loading zero points or integers fails with a RuntimeError, and dense experts
    are found by no key. Where the scheme is FP8, `weight` itself is looked for.

    Args:
        scheme: What is quantized, and how.
        chosen: Layers that are quantized.
        layers: All linear layers of the model.
    """
    if scheme.storage != "compressed-tensors":
        return []
    experts = [layer for layer in chosen if layer.is_expert]
    packed = {layer.name for layer in experts}
    dense = [layer.name for layer in layers if layer.is_expert and layer.name not in packed]
    if chosen and dense and (scheme.weights.number_type, scheme.weights.bits) != ("float", 8):
        rule = f"{dense[0]} and {len(dense) - 1} other matrices of experts would stay dense beside packed layers"
        told = f"{rule}, and Transformers 5.17 loads none"
        fix = "quantize the experts too, or use FP8_DYNAMIC, beside which they may stay dense"
        return [Fault(where="ignore", value=", ".join(scheme.ignore), rule=told, fix=fix)]
    if not experts:
        return []
    if not scheme.weights.symmetric:
        rule = f"{len(experts)} matrices of experts would have zero points, which Transformers 5.17 cannot load"
        return [Fault(where="scheme", value=scheme.name, rule=rule, fix="use a symmetric scheme such as W4A16")]
    if scheme.format == "int-quantized":
        rule = f"{len(experts)} matrices of experts would be stored as integers that Transformers 5.17 cannot load"
        fix = f"use W{scheme.weights.bits}A16, whose codes are packed"
        return [Fault(where="scheme", value=scheme.name, rule=rule, fix=fix)]
    return []
