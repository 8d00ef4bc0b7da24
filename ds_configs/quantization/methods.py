"""The quantization methods: which engine runs each, what it reads, and which schemes it can work with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..specs.errors import Fault
from .scheme import QuantizationScheme

MethodName = Literal[
    "rtn", "gptq", "awq", "smoothquant", "smoothquant-gptq", "autoround", "spqr", "low-rank", "bitsandbytes"
]
Engine = Literal["llm-compressor", "auto-round", "bitsandbytes", "shardwright"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """One way to find codes and scales."""

    name: MethodName
    """As `--method` takes it."""
    engine: Engine
    """The library that does the work."""
    needs_calibration: bool
    """Whether it reads calibration text whatever the scheme; static activations need it with every method."""
    summary: str
    """What it does, in one line."""
    source: str
    """The paper, or the library where there is none."""


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
            summary="rounds column by column and corrects the columns that follow by the inputs' second moments",
            source="arXiv 2210.17323",
        ),
        Method(
            name="awq",
            engine="llm-compressor",
            needs_calibration=True,
            summary="scales input channels before rounding so that those with large activations lose least",
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
            engine="auto-round",
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
"""Every method by its name."""

METHOD_NAMES: tuple[MethodName, ...] = get_args(MethodName)


def needs_calibration(method: MethodName, scheme: QuantizationScheme) -> bool:
    """Return whether a method reads calibration text for a scheme."""
    return METHODS[method].needs_calibration or scheme.activations_are_static


def default_method(scheme: QuantizationScheme, *, has_dataset: bool) -> tuple[MethodName, str]:
    """Return the method for a scheme when none is named, and the reason."""
    if scheme.storage == "bitsandbytes":
        return "bitsandbytes", f"{scheme.name} is a format of bitsandbytes"
    weights = scheme.weights
    if weights.bits > 4:
        return "rtn", f"{weights.bits}-bit codes lose little to plain rounding"
    if not has_dataset:
        return "rtn", "no calibration text is named, and rounding to the nearest code needs none"
    return "gptq", f"{weights.bits}-bit codes lose less when the columns that follow are corrected"


def combination_with_method_faults(
    method: MethodName, scheme: QuantizationScheme, options: Mapping[str, Any] | None = None
) -> list[Fault]:
    """Return why a method cannot work with a scheme; empty when it can.

    Args:
        method: A key of `METHODS`.
        scheme: What the checkpoint is to hold.
        options: The method's options, where one decides what fits.
    """
    weights, activations = scheme.weights, scheme.activations
    if (method == "bitsandbytes") != (scheme.storage == "bitsandbytes"):
        if method == "bitsandbytes":
            rule, fix = f"writes its own formats, and {scheme.name} is none of them", "use NF4 or BNB_INT8"
        else:
            rule, fix = f"cannot write {scheme.name}, a format of bitsandbytes", "use --method bitsandbytes"
        return [Fault(where="method", value=method, rule=rule, fix=fix)]
    match method:
        case "awq":
            # AWQModifier of llm-compressor 0.14.0.1 refuses this when calibration starts.
            if weights.strategy == "tensor" and (options or {}).get("duo_scaling", True) is not False:
                rule = "compares channels of weights, and one scale for the tensor tells them nothing apart"
                return [Fault(where="method", value=method, rule=rule, fix="use FP8_DYNAMIC, or duo_scaling: false")]
        case "smoothquant" | "smoothquant-gptq":
            if activations is None:
                rule = f"moves outliers out of rounded activations, and {scheme.name} leaves them in 16 bit"
                plain = "gptq" if method == "smoothquant-gptq" else "rtn"
                fix = f"use W8A8 or W8A8_STATIC, or --method {plain} or awq"
                return [Fault(where="method", value=method, rule=rule, fix=fix)]
        case "autoround":
            return _autoround_faults(scheme)
        case "spqr" | "low-rank":
            return _own_method_faults(method, scheme)
    return []


def _autoround_faults(scheme: QuantizationScheme) -> list[Fault]:
    weights = scheme.weights
    if scheme.activations_are_static:
        rule = "finds no stored ranges of activations"
        return [Fault(where="method", value="autoround", rule=rule, fix="use gptq or smoothquant-gptq")]
    if weights.number_type == "int" and scheme.activations is None:
        return []
    rule = f"learns the rounding of integer weights with 16-bit activations, and {scheme.name} is something else"
    return [Fault(where="method", value="autoround", rule=rule, fix="use W4A16, or --method gptq")]


def _own_method_faults(method: MethodName, scheme: QuantizationScheme) -> list[Fault]:
    weights = scheme.weights
    most = 4 if method == "spqr" else 8
    if weights.number_type == "int" and 2 <= weights.bits <= most and scheme.activations is None:
        return []
    rule = f"rounds weights alone, to integers of 2 to {most} bits, and {scheme.name} is something else"
    return [Fault(where="method", value=method, rule=rule, fix="use W3A16, or --method gptq")]
