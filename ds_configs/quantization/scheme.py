"""Quantization schemes, methods, and the rules of their combination."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from ..specs.errors import ConfigError, UsageError
from .other_names import meaning

WeightStrategy = Literal["tensor", "channel", "group", "tensor_group", "block"]
ActivationStrategy = Literal["token", "tensor", "group", "tensor_group"]
ScaleDtype = Literal["float8_e4m3fn", "uint8"]
Storage = Literal["compressed-tensors", "bitsandbytes", "spqr"]
RangeMethod = Literal["minmax", "percentile", "l2", "kl"]
WEIGHT_STRATEGIES: tuple[WeightStrategy, ...] = ("tensor", "channel", "group", "tensor_group", "block")
KNOWN_RANGES: tuple[RangeMethod, ...] = ("minmax", "percentile", "l2", "kl")


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightQuantization:
    """Stored format of a weight matrix [out, in]."""

    bits: int
    """Bits per code; 2 to 8 for integers, 4 or 8 for floats."""
    number_type: Literal["int", "float"] = "int"
    """Integers, or the floats FP8 (E4M3) and FP4 (E2M1)."""
    symmetric: bool = True
    """Without zero points."""
    strategy: WeightStrategy = "group"
    """Unit with one scale: the tensor, an output channel, `group_size` neighbours in a row, or a block."""
    group_size: int | None = 128
    """Input channels per scale; `None` unless the strategy is `group` or `tensor_group`."""
    block_shape: tuple[int, int] | None = None
    """Rows and columns per scale; `None` unless the strategy is `block`."""
    scale_dtype: ScaleDtype | None = None
    """Stored type of the scales; `None` for the model's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationQuantization:
    """Quantization of the inputs of a linear layer at run time."""

    bits: int = 8
    number_type: Literal["int", "float"] = "int"
    symmetric: bool = True
    """Without zero points."""
    dynamic: bool = True
    """Whether scales are computed at run time per token; otherwise one scale per tensor is stored."""
    group_size: int | None = None
    """Channels per scale (FP4 and MX formats); `None` for one scale per token or tensor."""
    scale_dtype: ScaleDtype | None = None
    """Stored type of the scales; `None` for the model's own."""
    range_method: RangeMethod = "minmax"
    """Method that computes a static range from calibration data."""
    percentile: float = 99.9
    """Percent of values inside the range, for `range_method="percentile"`."""

    @property
    def strategy(self) -> ActivationStrategy:
        """Unit with one scale; `tensor_group` also divides by a stored scale of the tensor (NVFP4)."""
        if self.group_size is not None:
            return "tensor_group" if self.scale_dtype == "float8_e4m3fn" else "group"
        return "token" if self.dynamic else "tensor"


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizationScheme:
    """Layers to quantize, and the format of their weights and inputs."""

    name: str
    """Name of the preset, such as `W4A16`."""
    weights: WeightQuantization
    activations: ActivationQuantization | None = None
    """Format of the layers' inputs; `None` for 16 bit."""
    storage: Storage = "compressed-tensors"
    """Library that defines the checkpoint format."""
    targets: tuple[str, ...] = ("Linear",)
    """Module classes, module names, or `re:` patterns of names."""
    ignore: tuple[str, ...] = ("lm_head",)
    """Module names or `re:` patterns that stay dense."""

    @property
    def activations_are_static(self) -> bool:
        """Whether ranges of the layers' inputs are stored, which requires calibration data.

        NVFP4 computes the scales of groups at run time, and divides them by a stored scale of the tensor.
        """
        activations = self.activations
        return activations is not None and (not activations.dynamic or activations.strategy == "tensor_group")

    @property
    def format(self) -> str:
        """Name of the format in `quantization_config`, as in compressed-tensors 0.19.0 `compressors/format.py`.

        Integers are packed only with 16-bit activations. With quantized activations every code takes one byte.
        """
        if self.storage != "compressed-tensors":
            return self.storage
        weights = self.weights
        if weights.number_type == "int":
            return "pack-quantized" if self.activations is None else "int-quantized"
        if weights.bits == 4:
            return "nvfp4-pack-quantized" if weights.group_size == 16 else "mxfp4-pack-quantized"
        if weights.scale_dtype == "uint8":
            return "mxfp8-quantized"
        return "float-quantized" if self.activations is not None else "naive-quantized"


def _integers(bits: int, *, activations: int | None = None, **changes: Any) -> QuantizationScheme:
    return QuantizationScheme(
        name="",
        weights=WeightQuantization(bits=bits, **changes),
        activations=None if activations is None else ActivationQuantization(bits=activations),
    )


def _floats(weights: WeightQuantization, activations: ActivationQuantization | None = None) -> QuantizationScheme:
    return QuantizationScheme(name="", weights=weights, activations=activations)


def _presets() -> dict[str, QuantizationScheme]:
    """Return all presets; names that compressed-tensors 0.19.0 has too mean the same there."""
    channel: dict[str, Any] = {"strategy": "channel", "group_size": None}
    schemes = {f"W{bits}A16": _integers(bits) for bits in range(2, 9)}
    schemes |= {f"W{bits}A16_ASYM": _integers(bits, symmetric=False) for bits in (2, 3, 4, 8)}
    schemes |= {f"W{bits}A8": _integers(bits, activations=8) for bits in range(2, 8)}
    schemes |= {f"W{bits}A4": _integers(bits, activations=4) for bits in range(2, 5)}
    dynamic = _integers(8, activations=8, **channel)
    static = replace(dynamic, activations=ActivationQuantization(dynamic=False))
    schemes |= {"W8A8": dynamic, "INT8": dynamic, "W8A8_STATIC": static}
    schemes["W4AFP8"] = replace(_integers(4), activations=ActivationQuantization(number_type="float"))
    tensor = WeightQuantization(bits=8, number_type="float", strategy="tensor", group_size=None)
    rows = replace(tensor, strategy="channel")
    blocks = replace(tensor, strategy="block", block_shape=(128, 128))
    inputs = ActivationQuantization(number_type="float")
    nvfp4 = WeightQuantization(
        bits=4, number_type="float", strategy="tensor_group", group_size=16, scale_dtype="float8_e4m3fn"
    )
    nvfp4_inputs = replace(inputs, bits=4, group_size=16, scale_dtype="float8_e4m3fn")
    mxfp4 = WeightQuantization(bits=4, number_type="float", group_size=32, scale_dtype="uint8")
    mxfp8 = replace(mxfp4, bits=8)
    mx_inputs = replace(inputs, group_size=32, scale_dtype="uint8")
    schemes |= {
        "FP8": _floats(tensor, replace(inputs, dynamic=False)),
        "FP8_DYNAMIC": _floats(rows, inputs),
        "FP8_BLOCK": _floats(blocks, replace(inputs, group_size=128)),
        "NVFP4A16": _floats(nvfp4),
        "NVFP4": _floats(nvfp4, nvfp4_inputs),
        "MXFP4A16": _floats(mxfp4),
        "MXFP4": _floats(mxfp4, replace(mx_inputs, bits=4)),
        "MXFP8A16": _floats(mxfp8),
        "MXFP8": _floats(mxfp8, mx_inputs),
    }
    four_bit = WeightQuantization(bits=4, number_type="float", group_size=64)
    eight_bit = WeightQuantization(bits=8, strategy="channel", group_size=None)
    schemes["NF4"] = QuantizationScheme(name="", weights=four_bit, storage="bitsandbytes")
    schemes["BNB_INT8"] = QuantizationScheme(name="", weights=eight_bit, storage="bitsandbytes")
    return {name: replace(scheme, name=name) for name, scheme in schemes.items()}


PRESETS = _presets()


NEWER_PRESETS = {"MXFP4XFP8": "MXFP4", "MXFP6A16": "MXFP8A16", "MXFP6A8": "MXFP8"}
"""Presets that need compressed-tensors 0.20.0, and the closest alternative: llm-compressor 0.14 needs 0.19.0."""


def scheme_named(name: str, *, with_method: bool = False) -> QuantizationScheme:
    """Return a preset by name; upper and lower case, `-` and `_` are equivalent.

    `with_method` is whether the caller has an option for the quantization method.

    Raises:
        UsageError: no preset has this name; the message suggests the one with its meaning, or the nearest.
    """
    preset = name.upper().replace("-", "_")
    if preset in PRESETS:
        return PRESETS[preset]
    rule, fix = meaning(name, with_method=with_method)
    if preset in NEWER_PRESETS:
        rule = "needs compressed-tensors 0.20.0, but llm-compressor 0.14.0.1 requires 0.19.0"
        fix = f"use {NEWER_PRESETS[preset]}"
    elif not rule:
        near = difflib.get_close_matches(preset, PRESETS, n=3, cutoff=0.5)
        rule = "is not a quantization scheme"
        fix = f"did you mean {', '.join(near)}?" if near else "use W4A16, W8A16, W8A8, FP8_DYNAMIC, NVFP4 or NF4"
    raise UsageError(ConfigError(where="--scheme", value=name, rule=rule, fix=fix))


MethodName = Literal[
    "rtn", "gptq", "awq", "smoothquant", "smoothquant-gptq", "autoround", "spqr", "low-rank", "bitsandbytes"
]
Engine = Literal["llm-compressor", "bitsandbytes", "shardwright"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """A method that computes codes and scales."""

    name: MethodName
    engine: Engine
    """Library that runs the method."""
    needs_calibration: bool
    """Whether it always reads calibration text; static activations need it with every method."""
    summary: str
    source: str


METHODS: Mapping[MethodName, Method] = {
    method.name: method
    for method in (
        Method(
            name="rtn",
            engine="llm-compressor",
            needs_calibration=False,
            summary="rounds each weight to the nearest code",
            source="llm-compressor QuantizationModifier",
        ),
        Method(
            name="gptq",
            engine="llm-compressor",
            needs_calibration=True,
            summary="rounds column by column and corrects the next columns with the second moments of the inputs",
            source="arXiv 2210.17323",
        ),
        Method(
            name="awq",
            engine="llm-compressor",
            needs_calibration=True,
            summary="scales input channels before rounding, so that those with large activations lose the least",
            source="arXiv 2306.00978",
        ),
        Method(
            name="smoothquant",
            engine="llm-compressor",
            needs_calibration=True,
            summary="moves outliers of activations into weights, then rounds both to the nearest code",
            source="arXiv 2211.10438",
        ),
        Method(
            name="smoothquant-gptq",
            engine="llm-compressor",
            needs_calibration=True,
            summary="moves outliers of activations into weights, then rounds weights by GPTQ",
            source="arXiv 2211.10438 and 2210.17323",
        ),
        Method(
            name="autoround",
            engine="llm-compressor",
            needs_calibration=True,
            summary="learns each rounding and range by signed gradient descent, layer by layer",
            source="arXiv 2309.05516",
        ),
        Method(
            name="spqr",
            engine="shardwright",
            needs_calibration=True,
            summary="keeps outliers in 16 bit as a sparse matrix and rounds the rest by GPTQ in small groups",
            source="arXiv 2306.03078",
        ),
        Method(
            name="low-rank",
            engine="shardwright",
            needs_calibration=True,
            summary="corrects rounded weights by a low-rank product and a sparse matrix",
            source="W ≈ L·R + Q + S",
        ),
        Method(
            name="bitsandbytes",
            engine="bitsandbytes",
            needs_calibration=False,
            summary="stores NF4 blocks or INT8 rows that bitsandbytes multiplies with",
            source="arXiv 2305.14314 and 2208.07339",
        ),
    )
}

METHOD_NAMES: tuple[MethodName, ...] = get_args(MethodName)


def needs_calibration(method: MethodName, scheme: QuantizationScheme) -> bool:
    """Return whether a method reads calibration text for a scheme."""
    return METHODS[method].needs_calibration or scheme.activations_are_static


def default_method(scheme: QuantizationScheme, *, has_dataset: bool) -> tuple[MethodName, str]:
    """Return the default method of a scheme, and the reason."""
    if scheme.storage == "bitsandbytes":
        return "bitsandbytes", f"{scheme.name} is a format of bitsandbytes"
    weights = scheme.weights
    if weights.bits > 4:
        return "rtn", f"{weights.bits} bits lose little with plain rounding"
    if not has_dataset:
        return "rtn", "no calibration text is given, and rounding to the nearest code needs none"
    return "gptq", f"{weights.bits} bits lose less if the remaining columns are adjusted"


def combination_with_method_errors(
    method: MethodName, scheme: QuantizationScheme, options: Mapping[str, object] | None = None
) -> list[ConfigError]:
    """Return the errors of a method with a scheme."""

    def error(rule: str, fix: str) -> list[ConfigError]:
        return [ConfigError(where="method", value=method, rule=rule, fix=fix)]

    weights, activations = scheme.weights, scheme.activations
    if method == "bitsandbytes" and scheme.storage != "bitsandbytes":
        return error(f"writes only its own formats, and {scheme.name} is not one of them", "use NF4 or BNB_INT8")
    if method != "bitsandbytes" and scheme.storage == "bitsandbytes":
        return error(f"cannot write {scheme.name}, a format of bitsandbytes", "use --method bitsandbytes")
    match method:
        case "awq":
            # AWQModifier of llm-compressor 0.14.0.1 rejects this when calibration starts.
            if weights.strategy == "tensor" and (options or {}).get("duo_scaling", True) is not False:
                rule = "compares channels of weights, which one scale per tensor does not distinguish"
                return error(rule, "use FP8_DYNAMIC, or duo_scaling: false")
        case "smoothquant" | "smoothquant-gptq":
            if activations is None:
                plain = "gptq" if method == "smoothquant-gptq" else "rtn"
                rule = f"moves outliers out of quantized activations, but {scheme.name} keeps activations in 16 bit"
                return error(rule, f"use W8A8 or W8A8_STATIC, or --method {plain} or awq")
        case "autoround":
            if scheme.activations_are_static:
                return error("does not compute static ranges of activations", "use gptq or smoothquant-gptq")
            if weights.number_type != "int" or activations is not None:
                rule = f"supports only integer weights with 16-bit activations, not {scheme.name}"
                return error(rule, "use W4A16, or --method gptq")
        case "spqr" | "low-rank":
            most = 4 if method == "spqr" else 8
            if weights.number_type != "int" or not 2 <= weights.bits <= most or activations is not None:
                rule = f"supports only integer weights of 2 to {most} bits with 16-bit activations, not {scheme.name}"
                return error(rule, "use W3A16, or --method gptq")
    return []


FEWEST_BITS, MOST_BITS = 2, 8
"""Bits of integer codes with more than two levels that `pack_to_int32` of compressed-tensors supports."""


def combination_errors(scheme: QuantizationScheme) -> list[ConfigError]:
    """Return all errors of a scheme that do not depend on the model."""
    errors = _pattern_errors("targets", scheme.targets) + _pattern_errors("ignore", scheme.ignore)
    if not scheme.targets:
        errors.append(ConfigError(where="targets", rule="must name at least one layer", fix="use Linear"))
    weights, activations = scheme.weights, scheme.activations
    if scheme.storage == "bitsandbytes":
        shape = (weights.bits, weights.strategy, weights.group_size, weights.symmetric)
        if shape in ((4, "group", 64, True), (8, "channel", None, True)):
            return errors
        rule = "bitsandbytes supports only NF4 in blocks of 64 and INT8 by row, both symmetric"
        fix = "do not change group size, bits, strategy or symmetry, or use W4A16"
        return [*errors, ConfigError(where="scheme", value=scheme.name, rule=rule, fix=fix)]
    errors += _integer_errors(weights) if weights.number_type == "int" else _float_errors(weights, scheme.name)
    if activations is not None:
        errors += _activation_errors(activations, weights)
    return errors


def _integer_errors(weights: WeightQuantization) -> list[ConfigError]:
    errors = []
    if not FEWEST_BITS <= weights.bits <= MOST_BITS:
        rule = f"must be from {FEWEST_BITS} to {MOST_BITS} for integers"
        errors.append(ConfigError(where="bits", value=weights.bits, rule=rule))
    if weights.strategy not in ("tensor", "channel", "group"):
        rule = "must be tensor, channel or group for integers"
        errors.append(ConfigError(where="strategy", value=weights.strategy, rule=rule))
    elif weights.strategy == "group":
        if weights.group_size is None or weights.group_size < 1:
            rule = "must be at least 1 input channel"
            errors.append(
                ConfigError(
                    where="group_size", value=weights.group_size, rule=rule, fix="use -1 for one scale per channel"
                )
            )
    elif weights.group_size is not None:
        rule = f"is only allowed with the strategy group, and the strategy is {weights.strategy}"
        errors.append(ConfigError(where="group_size", value=weights.group_size, rule=rule))
    return errors


_FLOAT_LAYOUTS = {
    (4, "tensor_group", 16, "float8_e4m3fn"): "NVFP4",
    (4, "group", 32, "uint8"): "MXFP4",
    (8, "group", 32, "uint8"): "MXFP8",
    (8, "tensor", None, None): "FP8",
    (8, "channel", None, None): "FP8_DYNAMIC",
    (8, "block", None, None): "FP8_BLOCK",
}


def _float_errors(weights: WeightQuantization, name: str) -> list[ConfigError]:
    errors = []
    if not weights.symmetric:
        errors.append(
            ConfigError(where="symmetric", value=False, rule="must be true for floats, which have no zero point")
        )
    layout = (weights.bits, weights.strategy, weights.group_size, weights.scale_dtype)
    if layout in _FLOAT_LAYOUTS:
        return errors
    known = [other for other in _FLOAT_LAYOUTS if other[0] == weights.bits]
    if not known:
        errors.append(ConfigError(where="bits", value=weights.bits, rule="must be 4 or 8 for floats"))
        return errors
    group = "" if weights.group_size is None else f", groups of {weights.group_size}"
    fix = f"use {', '.join(_FLOAT_LAYOUTS[other] for other in known)} unchanged"
    rule = f"no library supports {name} in this layout"
    return [*errors, ConfigError(where="strategy", value=f"{weights.strategy}{group}", rule=rule, fix=fix)]


def _activation_errors(activations: ActivationQuantization, weights: WeightQuantization) -> list[ConfigError]:
    errors = []
    if activations.number_type == "int":
        if not FEWEST_BITS <= activations.bits <= MOST_BITS:
            rule = f"must be from {FEWEST_BITS} to {MOST_BITS} for integer activations"
            errors.append(ConfigError(where="activations.bits", value=activations.bits, rule=rule))
        if weights.number_type == "float":
            rule = "must be float if weights are float"
            errors.append(ConfigError(where="activations.number_type", value="int", rule=rule))
    else:
        if activations.bits not in (4, 8):
            rule = "must be 4 or 8 for float activations"
            errors.append(ConfigError(where="activations.bits", value=activations.bits, rule=rule))
        if not activations.symmetric:
            rule = "must be true for floats, which have no zero point"
            errors.append(ConfigError(where="activations.symmetric", value=False, rule=rule))
    if activations.range_method != "minmax" and (activations.dynamic or activations.number_type == "float"):
        rule = "is only supported for static ranges of integer activations"
        errors.append(ConfigError(where="ranges", value=activations.range_method, rule=rule, fix="use W8A8_STATIC"))
    if not 50.0 < activations.percentile <= 100.0:
        rule = "must be above 50 and at most 100"
        errors.append(ConfigError(where="percentile", value=activations.percentile, rule=rule))
    return errors


def _pattern_errors(where: str, patterns: Sequence[str]) -> list[ConfigError]:
    errors = []
    for pattern in patterns:
        if not pattern.startswith("re:"):
            if not pattern.strip():
                errors.append(ConfigError(where=where, value=pattern, rule="must not be empty"))
            continue
        try:
            re.compile(pattern.removeprefix("re:"))
        except re.error as error:
            errors.append(ConfigError(where=where, value=pattern, rule=f"is not a valid regular expression ({error})"))
    return errors


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
    """Return a scheme with changed settings; `None` keeps a setting.

    A group size alone sets the strategy to `group`, and -1 sets it to `channel`. A strategy other than `group` removes
    the group size. `ignore` and `targets` replace those of the scheme.

    >>> changed(scheme_named("W4A16"), group_size=32, symmetric=False).weights.group_size
    32

    Raises:
        UsageError: all settings that are illegal for the format of the scheme.
    """
    weights, activations = scheme.weights, scheme.activations
    if bits is not None:
        weights = replace(weights, bits=bits)
    if symmetric is not None:
        weights = replace(weights, symmetric=symmetric)
    if strategy is None and group_size is not None:
        fixed = weights.strategy == "tensor_group"
        strategy = "channel" if group_size == -1 else ("tensor_group" if fixed else "group")
    if strategy in ("group", "tensor_group"):
        size = group_size if group_size is not None else weights.group_size or 128
        weights = replace(weights, strategy=strategy, group_size=size, block_shape=None)
    elif strategy is not None:
        block = (weights.block_shape or (128, 128)) if strategy == "block" else None
        group_size = None if group_size == -1 else group_size
        weights = replace(weights, strategy=strategy, group_size=group_size, block_shape=block)
    errors: list[ConfigError] = []
    requested = {name: value for name, value in (("ranges", ranges), ("percentile", percentile)) if value is not None}
    if requested and (activations is None or activations.dynamic):
        rule, fix = f"needs static ranges of activations, which {scheme.name} does not have", "use W8A8_STATIC"
        errors = [ConfigError(where=name, value=value, rule=rule, fix=fix) for name, value in requested.items()]
    elif requested and activations is not None:
        method = ranges or "percentile"
        if percentile is not None and method != "percentile":
            rule = "is only used with ranges = percentile"
            errors = [ConfigError(where="percentile", value=percentile, rule=rule)]
        else:
            share = activations.percentile if percentile is None else percentile
            activations = replace(activations, range_method=method, percentile=share)
    result = replace(
        scheme,
        weights=weights,
        activations=activations,
        ignore=scheme.ignore if ignore is None else tuple(ignore),
        targets=scheme.targets if targets is None else tuple(targets),
    )
    errors += combination_errors(result)
    if errors:
        raise UsageError(errors)
    return result
