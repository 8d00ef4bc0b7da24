"""Bits, strategies and scales that a storage format can hold together, and changes of a scheme that keep to them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ..specs.errors import Fault, UsageError
from .scheme import ActivationQuantization, QuantizationScheme, RangeMethod, WeightQuantization, WeightStrategy

FEWEST_BITS, MOST_BITS = 2, 8
"""Integer codes that `pack_to_int32` of compressed-tensors holds and that have more than two levels."""


def combination_faults(scheme: QuantizationScheme) -> list[Fault]:
    """Return everything in a scheme that its format cannot hold, whatever the model."""
    faults = _pattern_faults("targets", scheme.targets) + _pattern_faults("ignore", scheme.ignore)
    if not scheme.targets:
        faults.append(Fault(where="targets", rule="names nothing to quantize", fix="use Linear"))
    weights, activations = scheme.weights, scheme.activations
    if scheme.storage == "bitsandbytes":
        return faults + _bitsandbytes_faults(scheme)
    faults += _integer_faults(weights) if weights.number_type == "int" else _float_faults(weights, scheme.name)
    if activations is not None:
        faults += _activation_faults(activations, weights)
    return faults


def _integer_faults(weights: WeightQuantization) -> list[Fault]:
    faults = []
    if not FEWEST_BITS <= weights.bits <= MOST_BITS:
        rule = f"integers have {FEWEST_BITS} to {MOST_BITS} bits"
        faults.append(Fault(where="bits", value=weights.bits, rule=rule))
    if weights.strategy not in ("tensor", "channel", "group"):
        rule = "integers share a scale by tensor, channel or group"
        faults.append(Fault(where="strategy", value=weights.strategy, rule=rule))
    elif weights.strategy == "group":
        if weights.group_size is None or weights.group_size < 1:
            rule = "counts input channels, at least 1"
            faults.append(Fault(where="group_size", value=weights.group_size, rule=rule, fix="-1 means channel"))
    elif weights.group_size is not None:
        rule = f"belongs to the strategy group, and the strategy is {weights.strategy}"
        faults.append(Fault(where="group_size", value=weights.group_size, rule=rule))
    return faults


_FLOAT_LAYOUTS = {
    (4, "tensor_group", 16, "float8_e4m3fn"): "NVFP4",
    (4, "group", 32, "uint8"): "MXFP4",
    (8, "group", 32, "uint8"): "MXFP8",
    (8, "tensor", None, None): "FP8",
    (8, "channel", None, None): "FP8_DYNAMIC",
    (8, "block", None, None): "FP8_BLOCK",
}


def _float_faults(weights: WeightQuantization, name: str) -> list[Fault]:
    faults = []
    if not weights.symmetric:
        faults.append(Fault(where="symmetric", value=False, rule="floats have no zero point"))
    layout = (weights.bits, weights.strategy, weights.group_size, weights.scale_dtype)
    if layout in _FLOAT_LAYOUTS:
        return faults
    known = [other for other in _FLOAT_LAYOUTS if other[0] == weights.bits]
    if not known:
        faults.append(Fault(where="bits", value=weights.bits, rule="floats have 4 or 8 bits"))
        return faults
    group = "" if weights.group_size is None else f", groups of {weights.group_size}"
    stated = f"{weights.strategy}{group}"
    fix = f"use {', '.join(_FLOAT_LAYOUTS[other] for other in known)} as it is"
    rule = f"{name} in this layout is a format of no library"
    return [*faults, Fault(where="strategy", value=stated, rule=rule, fix=fix)]


def _activation_faults(activations: ActivationQuantization, weights: WeightQuantization) -> list[Fault]:
    faults = []
    if activations.number_type == "int":
        if not FEWEST_BITS <= activations.bits <= MOST_BITS:
            rule = f"integer activations have {FEWEST_BITS} to {MOST_BITS} bits"
            faults.append(Fault(where="activations.bits", value=activations.bits, rule=rule))
        if weights.number_type == "float":
            rule = "float weights need float activations"
            faults.append(Fault(where="activations.number_type", value="int", rule=rule))
    else:
        if activations.bits not in (4, 8):
            rule = "float activations have 4 or 8 bits"
            faults.append(Fault(where="activations.bits", value=activations.bits, rule=rule))
        if not activations.symmetric:
            rule = "floats have no zero point"
            faults.append(Fault(where="activations.symmetric", value=False, rule=rule))
    if activations.range_method != "minmax" and (activations.dynamic or activations.number_type == "float"):
        rule = "is searched for stored ranges of integer activations alone"
        faults.append(Fault(where="ranges", value=activations.range_method, rule=rule, fix="use W8A8_STATIC"))
    if not 50.0 < activations.percentile <= 100.0:
        rule = "lies above 50 and is at most 100"
        faults.append(Fault(where="percentile", value=activations.percentile, rule=rule))
    return faults


def _bitsandbytes_faults(scheme: QuantizationScheme) -> list[Fault]:
    weights = scheme.weights
    shape = (weights.bits, weights.strategy, weights.group_size, weights.symmetric)
    if shape in ((4, "group", 64, True), (8, "channel", None, True)):
        return []
    rule = "bitsandbytes has NF4 in blocks of 64 and INT8 by row, both symmetric, and no other layout"
    fix = "leave group size, bits, strategy and symmetry as they are, or use W4A16"
    return [Fault(where="scheme", value=scheme.name, rule=rule, fix=fix)]


def _pattern_faults(where: str, patterns: Sequence[str]) -> list[Fault]:
    faults = []
    for pattern in patterns:
        if not pattern.startswith("re:"):
            if not pattern.strip():
                faults.append(Fault(where=where, value=pattern, rule="is an empty name"))
            continue
        try:
            re.compile(pattern.removeprefix("re:"))
        except re.error as error:
            faults.append(Fault(where=where, value=pattern, rule=f"is no regular expression ({error})"))
    return faults


def changed(
    scheme: QuantizationScheme,
    *,
    group_size: int | None = None,
    symmetric: bool | None = None,
    bits: int | None = None,
    strategy: WeightStrategy | None = None,
    ranges: RangeMethod | None = None,
    percentile: float | None = None,
    ignore: Sequence[str] | None = None,
    targets: Sequence[str] | None = None,
) -> QuantizationScheme:
    """Return a scheme with some of its settings changed; `None` keeps the scheme's own.

    A group size alone makes the strategy `group`, -1 makes it `channel`; a strategy other than `group` drops the group
    size. `ignore` and `targets` take the place of the scheme's.

    >>> changed(scheme_named("W4A16"), group_size=32, symmetric=False).weights.group_size
    32

    Raises:
        UsageError: all settings that the scheme's format cannot hold.
    """
    weights = _changed_weights(scheme, bits=bits, symmetric=symmetric, strategy=strategy, group_size=group_size)
    activations, faults = _changed_activations(scheme, ranges=ranges, percentile=percentile)
    result = replace(
        scheme,
        weights=weights,
        activations=activations,
        ignore=scheme.ignore if ignore is None else tuple(ignore),
        targets=scheme.targets if targets is None else tuple(targets),
    )
    faults += combination_faults(result)
    if faults:
        raise UsageError(faults)
    return result


def _changed_weights(
    scheme: QuantizationScheme,
    *,
    bits: int | None,
    symmetric: bool | None,
    strategy: WeightStrategy | None,
    group_size: int | None,
) -> WeightQuantization:
    weights = scheme.weights
    if bits is not None:
        weights = replace(weights, bits=bits)
    if symmetric is not None:
        weights = replace(weights, symmetric=symmetric)
    if strategy is None and group_size is not None:
        fixed = weights.strategy == "tensor_group"
        strategy = "channel" if group_size == -1 else ("tensor_group" if fixed else "group")
    if strategy is None:
        return weights
    if strategy in ("group", "tensor_group"):
        chosen = group_size if group_size is not None else weights.group_size or 128
        return replace(weights, strategy=strategy, group_size=chosen, block_shape=None)
    block = (weights.block_shape or (128, 128)) if strategy == "block" else None
    kept = None if group_size == -1 else group_size
    return replace(weights, strategy=strategy, group_size=kept, block_shape=block)


def _changed_activations(
    scheme: QuantizationScheme, *, ranges: RangeMethod | None, percentile: float | None
) -> tuple[ActivationQuantization | None, list[Fault]]:
    activations = scheme.activations
    given = {name: value for name, value in (("ranges", ranges), ("percentile", percentile)) if value is not None}
    if not given:
        return activations, []
    if activations is None or activations.dynamic:
        rule, fix = f"needs stored ranges of activations, and {scheme.name} has none", "use W8A8_STATIC"
        return activations, [Fault(where=name, value=value, rule=rule, fix=fix) for name, value in given.items()]
    method = ranges or "percentile"
    if percentile is not None and method != "percentile":
        return activations, [Fault(where="percentile", value=percentile, rule="is used by ranges = percentile alone")]
    share = activations.percentile if percentile is None else percentile
    return replace(activations, range_method=method, percentile=share), []
