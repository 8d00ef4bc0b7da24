"""Linear layers by name and shape: which of them a scheme targets, and whether it fits them.

Names match as in compressed-tensors 0.19.0 (`utils/match.py`): a target is a class name, a whole module name, or `re:`
and a pattern that fits from the start of a name, not to its end. What `ignore` matches stays out.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import gcd

from ..specs.errors import Fault
from .scheme import QuantizationScheme

LINEAR_CLASSES = ("Linear", "Module")
"""Names that match every linear layer: its own class and the one it inherits from."""
DEFAULT_IGNORE = ("lm_head",)
"""What a scheme leaves out unless told otherwise; a model without such a layer is no mistake."""
_KERNEL_GROUP_SIZES = (16, 32, 64, 128, 256, 512, 1024)
_SHOWN_LAYERS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearLayer:
    """One linear layer, weight [out, in]."""

    name: str
    """Module name in the checkpoint, such as `model.layers.0.self_attn.q_proj`."""
    out_features: int
    """Rows of the weight."""
    in_features: int
    """Columns of the weight."""
    is_expert: bool = False
    """Belongs to one expert of a mixture."""
    is_tied: bool = False
    """Shares its weight with the token embedding."""
    is_head: bool = False
    """Produces the logits."""
    has_bias: bool = False
    """Adds a bias, which stays as it is."""

    @property
    def numel(self) -> int:
        """Elements of the weight."""
        return self.out_features * self.in_features


def selected_layers(scheme: QuantizationScheme, layers: Iterable[LinearLayer]) -> tuple[LinearLayer, ...]:
    """Return the layers that a scheme quantizes, in the order given.

    >>> [layer.name for layer in selected_layers(scheme_named("W4A16"), [q_proj, lm_head])]
    ['model.layers.0.self_attn.q_proj']
    """
    return tuple(
        layer
        for layer in layers
        if any(is_match(layer.name, target) for target in scheme.targets)
        and not any(is_match(layer.name, pattern) for pattern in scheme.ignore)
    )


def is_match(name: str, pattern: str) -> bool:
    """Return whether a target or an entry of `ignore` means the linear layer of this name."""
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), name) is not None
    return pattern == name or pattern in LINEAR_CLASSES


def with_named_heads(scheme: QuantizationScheme, chosen: Iterable[LinearLayer]) -> QuantizationScheme:
    """Return a scheme that targets output heads by name too, where it means them by class.

    vLLM 0.32.0 builds a head as `ParallelLMHead`, which the target `Linear` does not mean: it would look for a dense
    weight and refuse the packed one. A name that a class covers already changes nothing for Transformers.
    """
    unnamed = tuple(
        layer.name
        for layer in chosen
        if layer.is_head and all(target in LINEAR_CLASSES for target in scheme.targets if is_match(layer.name, target))
    )
    return replace(scheme, targets=(*scheme.targets, *unnamed)) if unnamed else scheme


def scheme_faults(
    scheme: QuantizationScheme, layers: Sequence[LinearLayer], chosen: Sequence[LinearLayer]
) -> list[Fault]:
    """Return everything that keeps a scheme from being applied to a model, all together.

    Args:
        scheme: What to quantize, and how; without faults of its own (`combination_faults`).
        layers: Every linear layer of the model.
        chosen: Those that the scheme selects.
    """
    faults = _unmatched_faults(scheme, layers)
    if not chosen and not any(fault.where == "targets" for fault in faults):
        rule = f"leaves no layer to quantize of {len(layers)} linear layers"
        faults.append(Fault(where="ignore", value=", ".join(scheme.ignore), rule=rule))
    faults += [_tied_fault(layer) for layer in chosen if layer.is_tied]
    return faults + _group_faults(scheme, chosen)


def scheme_remarks(scheme: QuantizationScheme, chosen: Sequence[LinearLayer]) -> list[str]:
    """Return what is legal and worth knowing before it costs hours: where a checkpoint is slow or large.

    What is said of vLLM rests on its documentation and source; nothing of it was run here.
    """
    weights, remarks = scheme.weights, []
    if scheme.format == "int-quantized" and weights.bits < 8:
        remarks.append(
            f"{scheme.name} stores each {weights.bits}-bit code in one byte: compressed-tensors packs codes only where "
            "activations stay in 16 bit"
        )
    if scheme.format == "pack-quantized":
        if weights.bits not in (4, 8):
            remarks.append(
                f"vLLM has kernels for packed codes of 4 and 8 bits; {weights.bits} bits run in Transformers"
            )
        if weights.strategy == "group" and weights.group_size not in (32, 64, 128):
            remarks.append(f"vLLM's Marlin kernel has groups of 32, 64 and 128, and no groups of {weights.group_size}")
        elif weights.group_size == 64:
            remarks.append("vLLM's Machete kernel has groups of 128 alone; groups of 64 take Marlin")
    heads = [layer.name for layer in chosen if layer.is_head]
    if heads:
        remarks.append(f"{', '.join(heads)} is quantized too: output heads are the most sensitive layers")
    if not scheme.weights.symmetric and any(layer.is_expert for layer in chosen):
        remarks.append("Transformers 5.17 loads no zero points of experts")
    return remarks


def legal_group_sizes(layers: Iterable[LinearLayer]) -> tuple[int, ...]:
    """Return group sizes that divide the inputs of every layer, smallest first.

    Powers of two from 16 to 1024, which kernels have; where none divides, every divisor from 8 up.
    """
    common = gcd(*(layer.in_features for layer in layers))
    sizes = tuple(size for size in _KERNEL_GROUP_SIZES if common % size == 0)
    return sizes or tuple(size for size in range(8, min(common, 1024) + 1) if common % size == 0)


def _unmatched_faults(scheme: QuantizationScheme, layers: Sequence[LinearLayer]) -> list[Fault]:
    names = [layer.name for layer in layers]
    faults = []
    for where, patterns in (("targets", scheme.targets), ("ignore", scheme.ignore)):
        for pattern in patterns:
            if where == "ignore" and pattern in DEFAULT_IGNORE:
                continue
            if not any(is_match(name, pattern) for name in names):
                rule = "matches no linear layer of the model"
                faults.append(Fault(where=where, value=pattern, rule=rule, fix=_nearest_names(pattern, names)))
    return faults


def _nearest_names(pattern: str, names: Sequence[str]) -> str:
    if pattern.startswith("re:"):
        return f"layers have names such as {names[0]}" if names else ""
    if any(name.startswith(f"{pattern}.") for name in names):
        escaped = pattern.replace(".", r"\.")
        return rf"names are compared whole: write re:{escaped}\. for everything in it"
    endings = [name for name in names if name.endswith(f".{pattern}")]
    if endings:
        return f"names are compared whole: write re:.*{pattern} for {endings[0]} and its like"
    near = difflib.get_close_matches(pattern, [*names, "Linear"], n=3, cutoff=0.5)
    return f"did you mean {', '.join(near)}?" if near else f"layers have names such as {names[0]}" if names else ""


def _tied_fault(layer: LinearLayer) -> Fault:
    # compressed-tensors 0.19 unties the embedding, keeps it dense and adds the packed head: the checkpoint grows.
    rule = "shares its weight with the token embedding, which stays dense, so that the checkpoint would grow"
    return Fault(where="targets", value=layer.name, rule=rule, fix=f"add {layer.name} to ignore")


def _group_faults(scheme: QuantizationScheme, chosen: Sequence[LinearLayer]) -> list[Fault]:
    size = scheme.weights.group_size
    if scheme.storage == "bitsandbytes" or size is None or size < 1:
        return []
    unfit = [layer for layer in chosen if layer.in_features % size]
    if not unfit:
        return []
    shown = ", ".join(f"{layer.name} ({layer.in_features})" for layer in unfit[:_SHOWN_LAYERS])
    more = f" and {len(unfit) - _SHOWN_LAYERS} more" if len(unfit) > _SHOWN_LAYERS else ""
    rule = f"must divide the inputs of every layer, and does not divide those of {shown}{more}"
    if scheme.weights.number_type == "float":
        fix = f"the format has groups of {size} alone: add these layers to ignore, or use FP8_DYNAMIC"
        return [Fault(where="group_size", value=size, rule=rule, fix=fix)]
    legal = ", ".join(str(legal) for legal in legal_group_sizes(chosen))
    ways = [f"group sizes that divide all: {legal}"] if legal else []
    fix = "; ".join([*ways, "or -1 for one scale by output channel", "or add these layers to ignore"])
    return [Fault(where="group_size", value=size, rule=rule, fix=fix)]
