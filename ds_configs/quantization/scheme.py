"""Quantization schemes, methods, and the rules of their combination."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from ..specs.errors import ConfigError, UsageError

WeightStrategy = Literal["tensor", "channel", "group", "tensor_group", "block"]
ActivationStrategy = Literal["token", "tensor", "group", "tensor_group"]
ScaleDtype = Literal["float8_e4m3fn", "uint8"]
Storage = Literal["compressed-tensors", "bitsandbytes", "spqr"]
RangeMethod = Literal["minmax", "percentile", "l2", "kl"]


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
    dynamic: bool = True
    """Whether scales are computed at run time per token; otherwise one scale per tensor is stored."""
    group_size: int | None = None
    """Channels per scale (FP4 and MX formats); `None` for one scale per token or tensor."""
    scale_dtype: ScaleDtype | None = None
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


def _presets() -> dict[str, QuantizationScheme]:
    """Return all presets; names that compressed-tensors 0.19.0 has too mean the same there."""
    groups = {bits: WeightQuantization(bits=bits) for bits in range(2, 9)}
    rows = WeightQuantization(bits=8, strategy="channel", group_size=None)
    codes, static = ActivationQuantization(), ActivationQuantization(dynamic=False)
    tensor = WeightQuantization(bits=8, number_type="float", strategy="tensor", group_size=None)
    floats = ActivationQuantization(number_type="float")
    nvfp4 = WeightQuantization(
        bits=4, number_type="float", strategy="tensor_group", group_size=16, scale_dtype="float8_e4m3fn"
    )
    mxfp4 = WeightQuantization(bits=4, number_type="float", group_size=32, scale_dtype="uint8")
    mx_floats = replace(floats, group_size=32, scale_dtype="uint8")
    formats: dict[str, tuple[WeightQuantization, ActivationQuantization | None]] = {
        **{f"W{bits}A16": (weights, None) for bits, weights in groups.items()},
        **{f"W{bits}A16_ASYM": (replace(groups[bits], symmetric=False), None) for bits in (2, 3, 4, 8)},
        **{f"W{bits}A8": (groups[bits], codes) for bits in range(2, 8)},
        **{f"W{bits}A4": (groups[bits], replace(codes, bits=4)) for bits in range(2, 5)},
        **dict.fromkeys(("W8A8", "INT8"), (rows, codes)),
        "W8A8_STATIC": (rows, static),
        "W4AFP8": (groups[4], floats),
        "FP8": (tensor, replace(floats, dynamic=False)),
        "FP8_DYNAMIC": (replace(tensor, strategy="channel"), floats),
        "FP8_BLOCK": (replace(tensor, strategy="block", block_shape=(128, 128)), replace(floats, group_size=128)),
        "NVFP4A16": (nvfp4, None),
        "NVFP4": (nvfp4, replace(floats, bits=4, group_size=16, scale_dtype="float8_e4m3fn")),
        "MXFP4A16": (mxfp4, None),
        "MXFP4": (mxfp4, replace(mx_floats, bits=4)),
        "MXFP8A16": (replace(mxfp4, bits=8), None),
        "MXFP8": (replace(mxfp4, bits=8), mx_floats),
    }
    schemes = {
        name: QuantizationScheme(name=name, weights=weights, activations=activations)
        for name, (weights, activations) in formats.items()
    }
    four_bit = WeightQuantization(bits=4, number_type="float", group_size=64)
    for name, weights in (("NF4", four_bit), ("BNB_INT8", rows)):
        schemes[name] = QuantizationScheme(name=name, weights=weights, storage="bitsandbytes")
    return schemes


PRESETS = _presets()


NEWER_PRESETS = {"MXFP4XFP8": "MXFP4", "MXFP6A16": "MXFP8A16", "MXFP6A8": "MXFP8"}
"""Presets that need compressed-tensors 0.20.0, and the closest alternative: llm-compressor 0.14 needs 0.19.0."""
_OTHER_NAMES = {
    **dict.fromkeys(("INT4", "4BIT", "W4"), "W4A16"),
    **dict.fromkeys(("8BIT", "W8"), "W8A16"),
    **dict.fromkeys(("BITSANDBYTES", "BNB", "BNB4BIT", "QLORA"), "NF4"),
    **dict.fromkeys(("FLOAT8", "E4M3"), "FP8_DYNAMIC"),
    **dict.fromkeys(("FP4", "E2M1"), "NVFP4"),
}
"""Presets by their names in other tools, without separators."""


def scheme_named(name: str) -> QuantizationScheme:
    """Return a preset by name; upper and lower case, `-` and `_` are equivalent.

    Raises:
        UsageError: no preset has this name; the message suggests the one with its meaning, or the nearest.
    """
    preset = name.upper().replace("-", "_")
    if preset in PRESETS:
        return PRESETS[preset]
    plain, rule = re.sub(r"[_. ]", "", preset), "is not a quantization scheme"
    near = difflib.get_close_matches(preset, PRESETS, n=3, cutoff=0.5)
    fix = f"did you mean {', '.join(near)}?" if near else "use W4A16, W8A16, W8A8, FP8_DYNAMIC, NVFP4 or NF4"
    if preset in NEWER_PRESETS:
        rule = "needs compressed-tensors 0.20.0, but llm-compressor 0.14.0.1 requires 0.19.0"
        fix = f"use {NEWER_PRESETS[preset]}"
    elif plain in _OTHER_NAMES:
        fix = f"use {_OTHER_NAMES[plain]}"
    elif grouped := re.fullmatch(r"(W\d+A\d+)_?G(\d+)", preset):
        fix = f"use --scheme {grouped[1]} --group-size {grouped[2]}"
    elif re.match(r"GGUF|I?Q\d", plain):
        rule, fix = "is a format of llama.cpp", "convert the checkpoint with llama.cpp's convert_hf_to_gguf.py"
    elif "AUTOROUND" in plain:
        rule, fix = "is a method, not a scheme", "use --method gptq --scheme W4A16 of quantize"
    elif methods := [method for method in METHODS if method.replace("-", "").upper() in plain]:
        method = max(methods, key=len)
        other = "W8A8" if method.startswith("smoothquant") else "W4A16"
        rule, fix = "is a method, not a scheme", f"use --method {method} --scheme {other} of quantize"
    raise UsageError(ConfigError(where="--scheme", value=name, rule=rule, fix=fix))


MethodName = Literal["rtn", "gptq", "awq", "smoothquant", "smoothquant-gptq", "spqr", "low-rank", "bitsandbytes"]
Engine = Literal["llm-compressor", "bitsandbytes", "shardwright"]


class Method(NamedTuple):
    """A method that computes codes and scales."""

    engine: Engine
    needs_calibration: bool
    """Whether it always reads calibration text; static activations need it with every method."""


METHODS: Mapping[MethodName, Method] = {
    "rtn": Method("llm-compressor", False),
    "gptq": Method("llm-compressor", True),
    "awq": Method("llm-compressor", True),
    "smoothquant": Method("llm-compressor", True),
    "smoothquant-gptq": Method("llm-compressor", True),
    "spqr": Method("shardwright", True),
    "low-rank": Method("shardwright", True),
    "bitsandbytes": Method("bitsandbytes", False),
}


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
    def error(rule: str, fix: str) -> list[ConfigError]:
        return [ConfigError(where="method", value=method, rule=rule, fix=fix)]

    weights, activations = scheme.weights, scheme.activations
    if method == "bitsandbytes" and scheme.storage != "bitsandbytes":
        return error(f"writes only its own formats, and {scheme.name} is not one of them", "use NF4 or BNB_INT8")
    if method != "bitsandbytes" and scheme.storage == "bitsandbytes":
        return error(f"cannot write {scheme.name}, a format of bitsandbytes", "use --method bitsandbytes")
    match method:
        case "bitsandbytes":
            if options:
                return error("has no options: the scheme determines its formats", "omit --method-option")
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
    formats = {preset.weights: preset for preset in PRESETS.values() if preset.storage == scheme.storage}
    if scheme.storage == "bitsandbytes":
        if weights not in formats:
            rule = "bitsandbytes supports only NF4 in blocks of 64 and INT8 by row, both symmetric"
            fix = "do not change group size, bits, strategy or symmetry, or use W4A16"
            errors.append(ConfigError(where="scheme", value=scheme.name, rule=rule, fix=fix))
        return errors

    def check(is_legal: bool, where: str, value: object, rule: str, fix: str = "") -> None:
        if not is_legal:
            errors.append(ConfigError(where=where, value=value, rule=rule, fix=fix))

    size, strategy = weights.group_size, weights.strategy
    if weights.number_type == "int":
        is_supported = FEWEST_BITS <= weights.bits <= MOST_BITS
        check(is_supported, "bits", weights.bits, f"must be from {FEWEST_BITS} to {MOST_BITS} for integers")
        is_known = strategy in ("tensor", "channel", "group") and weights.block_shape is None
        check(is_known, "strategy", strategy, "must be tensor, channel or group for integers")
        fix = "use -1 for one scale per channel"
        is_sized = size is not None and size >= 1 if strategy == "group" else size is None
        check(is_sized, "group_size", size, "must be at least 1 input channel, for the strategy group", fix)
    else:
        check(weights.symmetric, "symmetric", False, "must be true for floats, which have no zero point")
        shape = strategy if size is None else f"{strategy}, groups of {size}"
        names = [preset.name for other, preset in formats.items() if other.number_type == "float"]
        fix = f"use {', '.join(names)} unchanged"
        is_preset = replace(weights, symmetric=True) in formats
        check(is_preset, "strategy", shape, f"no library supports {scheme.name} in this layout", fix)
    if activations is None:
        return errors
    is_searchable = not activations.dynamic and activations.number_type == "int"
    method, rule = activations.range_method, "is only supported for static ranges of integer activations"
    check(is_searchable or method == "minmax", "ranges", method, rule, "use W8A8_STATIC")
    is_share = 50.0 < activations.percentile <= 100.0
    check(is_share, "percentile", activations.percentile, "must be above 50 and at most 100")
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
    ranges: RangeMethod | None = None,
    percentile: float | None = None,
    ignore: Sequence[str] | None = None,
    targets: Sequence[str] | None = None,
) -> QuantizationScheme:
    """Return a scheme with changed settings; `None` keeps a setting.

    A group size sets the strategy to `group`, and -1 sets it to `channel`. `ignore` and `targets` replace those of the
    scheme. Raises `UsageError` with all settings that are illegal for the format.

    >>> changed(scheme_named("W4A16"), group_size=32, symmetric=False).weights.group_size
    32
    """
    weights, activations = scheme.weights, scheme.activations
    if symmetric is not None:
        weights = replace(weights, symmetric=symmetric)
    if group_size == -1:
        weights = replace(weights, strategy="channel", group_size=None, block_shape=None)
    elif group_size is not None:
        strategy: WeightStrategy = "tensor_group" if weights.strategy == "tensor_group" else "group"
        weights = replace(weights, strategy=strategy, group_size=group_size, block_shape=None)
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
