"""`QuantizationScheme`: which numbers take the place of 16-bit weights and activations; shared by PTQ and QAT.

The words and the defaults are those of compressed-tensors 0.19.0 (`quantization/quant_args.py`, `quant_scheme.py`), so
that a scheme turns into its `quantization_config` without translation tables.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..specs.errors import Fault, UsageError

WeightStrategy = Literal["tensor", "channel", "group", "tensor_group", "block"]
ActivationStrategy = Literal["token", "tensor", "group", "tensor_group"]
ScaleDtype = Literal["float8_e4m3fn", "uint8"]
Storage = Literal["compressed-tensors", "bitsandbytes", "spqr"]
RangeMethod = Literal["minmax", "percentile", "l2", "kl"]
WEIGHT_STRATEGIES: tuple[WeightStrategy, ...] = ("tensor", "channel", "group", "tensor_group", "block")
KNOWN_RANGES: tuple[RangeMethod, ...] = ("minmax", "percentile", "l2", "kl")


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightQuantization:
    """Storage of the numbers of one weight matrix [out, in]."""

    bits: int
    """Bits of one code; 2 to 8 for integers, 4 or 8 for floats."""
    number_type: Literal["int", "float"] = "int"
    """Integers, or the floats FP8 (E4M3) and FP4 (E2M1)."""
    symmetric: bool = True
    """Without a zero point."""
    strategy: WeightStrategy = "group"
    """What shares one scale: the tensor, one output channel, `group_size` neighbours in a row, or a block."""
    group_size: int | None = 128
    """Input channels that share a scale; `None` unless the strategy is `group` or `tensor_group`."""
    block_shape: tuple[int, int] | None = None
    """Rows and columns that share a scale; `None` unless the strategy is `block`."""
    scale_dtype: ScaleDtype | None = None
    """Stored type of the scales; `None` for the model's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationQuantization:
    """Rounding of the inputs of a linear layer when it runs."""

    bits: int = 8
    """Bits of one code."""
    number_type: Literal["int", "float"] = "int"
    """Integers or floats."""
    symmetric: bool = True
    """Without a zero point."""
    dynamic: bool = True
    """Scales found while the model runs, for each token; otherwise stored, one for the tensor."""
    group_size: int | None = None
    """Channels that share a scale (FP4 and MX formats); `None` for the whole token or tensor."""
    scale_dtype: ScaleDtype | None = None
    """Stored type of the scales; `None` for the model's own."""
    range_method: RangeMethod = "minmax"
    """How a static range is found from calibration data."""
    percentile: float = 99.9
    """Share of values inside the range, in percent, for `range_method="percentile"`."""

    @property
    def strategy(self) -> ActivationStrategy:
        """Numbers that share one scale; `tensor_group` also divides by one stored scale for the tensor (NVFP4)."""
        if self.group_size is not None:
            return "tensor_group" if self.scale_dtype == "float8_e4m3fn" else "group"
        return "token" if self.dynamic else "tensor"


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizationScheme:
    """Layers to quantize, and the numbers that take the place of theirs."""

    name: str
    """Preset it came from, such as `W4A16`."""
    weights: WeightQuantization
    """The weights of the targets."""
    activations: ActivationQuantization | None = None
    """The inputs of the targets; `None` leaves them in 16 bit."""
    storage: Storage = "compressed-tensors"
    """The library whose format the checkpoint has."""
    targets: tuple[str, ...] = ("Linear",)
    """Module classes, module names, or `re:` patterns of names."""
    ignore: tuple[str, ...] = ("lm_head",)
    """Module names or `re:` patterns that stay as they are."""

    @property
    def activations_are_static(self) -> bool:
        """Whether a range of every layer's inputs is stored, for which calibration data is needed.

        NVFP4 finds the scales of its groups while the model runs, and divides them by one stored for the tensor.
        """
        activations = self.activations
        return activations is not None and (not activations.dynamic or activations.strategy == "tensor_group")

    @property
    def format(self) -> str:
        """The format's name in `quantization_config`, by the rule of compressed-tensors 0.19.0 `compressors/format.py`.

        Integers are packed only where activations stay in 16 bit: with rounded activations every code takes one byte,
        whatever `bits` says.
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


def _integer_presets() -> dict[str, QuantizationScheme]:
    channel: dict[str, Any] = {"strategy": "channel", "group_size": None}
    schemes = {f"W{bits}A16": _integers(bits) for bits in range(2, 9)}
    schemes |= {f"W{bits}A16_ASYM": _integers(bits, symmetric=False) for bits in (2, 3, 4, 8)}
    schemes |= {f"W{bits}A8": _integers(bits, activations=8) for bits in range(2, 8)}
    schemes |= {f"W{bits}A4": _integers(bits, activations=4) for bits in range(2, 5)}
    dynamic = _integers(8, activations=8, **channel)
    static = replace(dynamic, activations=ActivationQuantization(dynamic=False))
    schemes |= {"W8A8": dynamic, "INT8": dynamic, "W8A8_STATIC": static}
    schemes["W4AFP8"] = replace(_integers(4), activations=ActivationQuantization(number_type="float"))
    return schemes


def _float_presets() -> dict[str, QuantizationScheme]:
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
    return {
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


def _presets() -> dict[str, QuantizationScheme]:
    """The names of compressed-tensors 0.19.0 mean what they mean there; the rest is ours and says so in the docs."""
    four_bit = WeightQuantization(bits=4, number_type="float", group_size=64)
    eight_bit = WeightQuantization(bits=8, strategy="channel", group_size=None)
    schemes = _integer_presets() | _float_presets()
    schemes["NF4"] = QuantizationScheme(name="", weights=four_bit, storage="bitsandbytes")
    schemes["BNB_INT8"] = QuantizationScheme(name="", weights=eight_bit, storage="bitsandbytes")
    return {name: replace(scheme, name=name) for name, scheme in schemes.items()}


PRESETS = _presets()
"""Every named scheme."""


def scheme_named(name: str) -> QuantizationScheme:
    """Return a preset by its name, in either case, with `-` or `_`.

    Raises:
        UsageError: no preset has this name; the nearest are offered.
    """
    wanted = name.upper().replace("-", "_")
    if wanted in PRESETS:
        return PRESETS[wanted]
    near = difflib.get_close_matches(wanted, PRESETS, n=3, cutoff=0.5)
    fix = f"did you mean {', '.join(near)}?" if near else f"known are {', '.join(PRESETS)}"
    raise UsageError(Fault(where="--scheme", value=name, rule="names no quantization scheme", fix=fix))
