"""Integer codes, scales and zero points, as compressed-tensors 0.19.0 and 0.20.0 compute and store them.

A code is an integer in [-2^(b-1), 2^(b-1) - 1], b bits; `low` and `high` are the ends of a range that holds 0:

    symmetric     scale = max(|low|, |high|) / ((2^b - 1) / 2)       code = round(clamp(x / scale))
    asymmetric    scale = (high - low) / (2^b - 1)                   code = round(clamp(x / scale + zero_point))
                  zero_point = round(clamp(-2^(b-1) - low / scale))
    both          x' = (code - zero_point) · scale

Halves round to even. Source: `quantization/utils/helpers.py` (`calculate_qparams`), `quantization/lifecycle/
forward_helpers.py` (`_quantize`, `_dequantize`).

The type in which upstream computes decides about codes at a half: `x / scale` happens in the wider type of both, and
`x'` in the type of the scale, which is the one that the checkpoint holds. A bf16 weight therefore gives other codes
than the same numbers in fp32; convert the weight first to divide in fp32. No function changes its arguments.

Shapes: O output channels, I input channels, G = I / group size, S: the scale's shape and the elements that share it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...ds_configs.quantization.layers import config_group
from ...ds_configs.quantization.scheme import ActivationQuantization, QuantizationScheme, WeightQuantization

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def code_range(bits: int) -> tuple[int, int]:
    """Return the least and the largest code.

    >>> code_range(4)
    (-8, 7)
    """
    return -(1 << bits - 1), (1 << bits - 1) - 1


def range_scale_and_zero_point(
    low: Tensor, high: Tensor, *, bits: int, symmetric: bool, stored_dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Return the scale, in the type that is stored, and the int8 zero point of ranges.

    The scale is rounded to the stored type before anything is computed from it; where that leaves 0, it becomes the
    type's epsilon, as upstream's does.

    Args:
        low: Least value of each range, any shape; 0 is added to the range.
        high: Largest value.
        bits: Bits of a code.
        symmetric: Without a zero point.
        stored_dtype: Type of scales in the checkpoint.
    """
    import torch

    least, largest = code_range(bits)
    zero = torch.zeros_like(low)
    low, high = torch.minimum(low, zero), torch.maximum(high, zero)
    steps = float(largest - least)
    scale = torch.maximum(low.abs(), high.abs()) / (steps / 2) if symmetric else (high - low) / steps
    scale = scale.to(stored_dtype)
    scale = torch.where(scale == 0, torch.full_like(scale, torch.finfo(scale.dtype).eps), scale)
    if symmetric:
        return scale, None
    zero_point = torch.round(torch.clamp(least - low / scale, least, largest))
    # Upstream divides 0 by 0 for a range of zeros alone, and its NaN becomes the integer 0.
    zero_point = torch.where(low == high, torch.zeros_like(zero_point), zero_point)
    return scale, zero_point.to(torch.int8)


def weight_scale_and_zero_point(
    weight: Tensor, quantization: WeightQuantization, stored_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return scales and zero points of a weight, from the least and largest number of what shares them.

    Args:
        weight: [O, I].
        quantization: Integers by tensor, channel or group.
        stored_dtype: Type of scales in the checkpoint; `None` for the weight's own.

    Returns:
        Two tensors of shape [1] by tensor, [O, 1] by channel, [O, G] by group; the zero point is `None` if symmetric.
    """
    assert quantization.number_type == "int", "floats have no integer codes"
    shared_S = sharing(weight, quantization)
    return range_scale_and_zero_point(
        shared_S.amin(dim=-1),
        shared_S.amax(dim=-1),
        bits=quantization.bits,
        symmetric=quantization.symmetric,
        stored_dtype=weight.dtype if stored_dtype is None else stored_dtype,
    )


def weight_levels(weight: Tensor, scale: Tensor, zero_point: Tensor | None, quantization: WeightQuantization) -> Tensor:
    """Return the codes of a weight [O, I] as floats, with what `weight_scale_and_zero_point` returns."""
    zero_S1 = None if zero_point is None else zero_point.unsqueeze(-1)
    levels_S = levels_of(sharing(weight, quantization), scale.unsqueeze(-1), zero_S1, quantization.bits)
    return levels_S.reshape(weight.shape)


def activation_scale_and_zero_point(
    values: Tensor, quantization: ActivationQuantization
) -> tuple[Tensor, Tensor | None]:
    """Return scales and zero points that activations [..., I] get while a model runs.

    One for each token, [..., 1]. Inputs of two dimensions share a single one, [1]: upstream takes the first two
    dimensions for batch and sequence (`compute_dynamic_scales_and_zp` of 0.19.0).
    """
    import torch

    assert quantization.number_type == "int", "floats have no integer codes"
    if values.ndim <= 2:
        low, high = (end.reshape(1) for end in torch.aminmax(values))
    else:
        over = tuple(range(2, values.ndim))
        low, high = values.amin(dim=over, keepdim=True), values.amax(dim=over, keepdim=True)
    return range_scale_and_zero_point(
        low, high, bits=quantization.bits, symmetric=quantization.symmetric, stored_dtype=values.dtype
    )


@dataclass(frozen=True, kw_only=True)
class RoundedWeight:
    """A rounded matrix as codes, scales and zero points, as it is computed and as a checkpoint stores it."""

    codes: Tensor
    """[O, I]: floats while computing, int8 from a checkpoint."""
    scale: Tensor
    """[1], [O, 1] or [O, G], in the stored dtype."""
    zero_point: Tensor | None
    """int8, with the scale's shape; `None` if symmetric."""
    input_scale: Tensor | None = None
    """[1], of the layer's inputs; `None` unless ranges of activations are stored."""
    input_zero_point: Tensor | None = None
    """int8 [1]; `None` unless they are asymmetric."""

    def value(self, quantization: WeightQuantization) -> Tensor:
        """Return the weight [O, I] in the dtype of the scale, as loading a checkpoint does."""
        zero_S1 = None if self.zero_point is None else self.zero_point.unsqueeze(-1)
        value_S = values_of(sharing(self.codes, quantization), self.scale.unsqueeze(-1), zero_S1)
        return value_S.reshape(self.codes.shape)


def pack_tensors(layer_name: str, matrix: RoundedWeight, scheme: QuantizationScheme) -> dict[str, Tensor]:
    """Return the tensors of one layer, named `layer_name` in the checkpoint, as a checkpoint stores them.

    The scheme is of format `pack-quantized` or `int-quantized`.
    """
    import torch
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    weights, codes, zero_point = scheme.weights, matrix.codes.to(torch.int8), matrix.zero_point
    assert (zero_point is None) == weights.symmetric, "only asymmetric weights have zero points"
    assert (matrix.input_scale is not None) == scheme.activations_are_static, "only stored ranges have input scales"
    parts: dict[str, Tensor | None]
    if scheme.format == "pack-quantized":
        parts = {
            "weight_packed": pack_to_int32(codes, weights.bits),
            "weight_shape": torch.tensor(codes.shape, dtype=torch.int64),
        }
        if zero_point is not None and weights.strategy != "tensor":
            zero_point = pack_to_int32(zero_point, weights.bits, packed_dim=0)
    else:
        assert scheme.format == "int-quantized", f"{scheme.format} has no integer codes"
        parts = {"weight": codes}
    parts |= {"weight_scale": matrix.scale, "weight_zero_point": zero_point}
    parts |= {"input_scale": matrix.input_scale, "input_zero_point": matrix.input_zero_point}
    return {f"{layer_name}.{part}": tensor.contiguous() for part, tensor in parts.items() if tensor is not None}


def unpack_tensors(layer_name: str, tensors: Mapping[str, Tensor], scheme: QuantizationScheme) -> RoundedWeight:
    """Return codes, scales and zero points of one layer from the tensors of a checkpoint.

    Raises:
        KeyError: a tensor that the scheme demands is not there.
    """
    import torch
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    weights, activations = scheme.weights, scheme.activations
    scale = tensors[f"{layer_name}.weight_scale"]
    zero_point = None if weights.symmetric else tensors[f"{layer_name}.weight_zero_point"]
    if scheme.format == "pack-quantized":
        shape = torch.Size(tensors[f"{layer_name}.weight_shape"].tolist())
        codes = unpack_from_int32(tensors[f"{layer_name}.weight_packed"], weights.bits, shape)
        if zero_point is not None and weights.strategy != "tensor":
            # Transposed here: with `packed_dim=0` release 0.20.0 fails on the strides of a single row of words.
            words = zero_point.transpose(0, 1).clone(memory_format=torch.contiguous_format)
            zero_shape = torch.Size((scale.shape[-1], shape[0]))
            zero_point = unpack_from_int32(words, weights.bits, zero_shape).transpose(0, 1).contiguous()
    else:
        assert scheme.format == "int-quantized", f"{scheme.format} has no integer codes"
        codes = tensors[f"{layer_name}.weight"]
    static = activations if scheme.activations_are_static else None
    asymmetric = static is not None and not static.symmetric
    return RoundedWeight(
        codes=codes,
        scale=scale,
        zero_point=zero_point,
        input_scale=None if static is None else tensors[f"{layer_name}.input_scale"],
        input_zero_point=tensors[f"{layer_name}.input_zero_point"] if asymmetric else None,
    )


def to_upstream(scheme: QuantizationScheme) -> Any:
    """Convert a scheme to the `QuantizationScheme` of compressed-tensors."""
    from compressed_tensors.quantization import QuantizationScheme as UpstreamScheme

    return UpstreamScheme.model_validate(config_group(scheme))


def levels_of(values: Tensor, scale: Tensor, zero_point: Tensor | None, bits: int) -> Tensor:
    """Return the codes of values as floats, with scales that fit their shape."""
    import torch

    scaled = values / scale
    if zero_point is not None:
        scaled = scaled + zero_point.to(values.dtype)
    return torch.round(torch.clamp(scaled, *code_range(bits)))


def values_of(codes: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """Return the values that codes represent, in the dtype of the scale."""
    levels = codes.to(scale.dtype)
    if zero_point is not None:
        levels = levels - zero_point.to(scale.dtype)
    return levels * scale


def sharing(matrix: Tensor, quantization: WeightQuantization) -> Tensor:
    """Return a view [*scale shape, elements per scale] of a matrix [O, I]."""
    if quantization.strategy == "tensor":
        return matrix.reshape(1, -1)
    columns = matrix.shape[-1]
    size = columns if quantization.strategy == "channel" else quantization.group_size
    assert size is not None and columns % size == 0, f"groups of {size} do not divide {columns} input channels"
    return matrix.unflatten(-1, (columns // size, size))
