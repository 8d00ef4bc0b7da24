"""Names, shapes, types and bytes of the tensors that a quantized layer has in a checkpoint.

Layouts of compressed-tensors 0.19.0, by format, for a weight [out, in]; s is the shape of its scales:

    pack-quantized         weight_packed int32 [out, ⌈in·bits/32⌉], weight_scale s, weight_shape int64 [2];
                           asymmetric: weight_zero_point int32 [⌈out·bits/32⌉, columns of s]
    int-quantized          weight int8 [out, in], weight_scale s; asymmetric: weight_zero_point int8 s
    float-quantized        weight float8_e4m3fn [out, in], weight_scale s
    nvfp4-pack-quantized   weight_packed uint8 [out, in/2], weight_scale float8_e4m3fn s, weight_global_scale fp32 [1]
    mxfp4-pack-quantized   weight_packed uint8 [out, in/2], weight_scale uint8 s
    mxfp8-quantized        weight float8_e4m3fn [out, in], weight_scale uint8 s

    s = [1] by tensor, [out, 1] by channel, [out, ⌈in/group⌉] by group, [⌈out/rows⌉, ⌈in/columns⌉] by block

Stored ranges of activations add input_scale [1], input_zero_point int8 [1] and, for NVFP4, input_global_scale fp32 [1].
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import ceil, prod

from .layers import LinearLayer
from .scheme import QuantizationScheme

TensorShape = tuple[tuple[int, ...], str]
"""Shape and type of one tensor; types have torch's names, such as `bfloat16`."""

DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
"""Bytes of one element."""

SAFETENSORS_DTYPES: Mapping[str, str] = {
    "float64": "F64",
    "int64": "I64",
    "float32": "F32",
    "int32": "I32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""The same types in the words of safetensors headers."""


def tensor_bytes(tensors: Iterable[TensorShape]) -> int:
    """Return the bytes of some tensors."""
    return sum(prod(shape) * DTYPE_BYTES[dtype] for shape, dtype in tensors)


def packed_tensors(scheme: QuantizationScheme, layer: LinearLayer, dtype: str = "bfloat16") -> dict[str, TensorShape]:
    """Return the tensors that stand for one layer's weight and ranges, by the last part of their names.

    The bias is not among them: it stays as it is.

    >>> packed_tensors(scheme_named("W4A16"), LinearLayer(name="q_proj", out_features=256, in_features=256))
    {'weight_packed': ((256, 32), 'int32'), 'weight_scale': ((256, 2), 'bfloat16'), 'weight_shape': ((2,), 'int64')}

    Args:
        scheme: How the layer is stored.
        layer: Its name and shape.
        dtype: Type of the model's weights, which scales share.
    """
    if scheme.storage == "bitsandbytes":
        return _bitsandbytes_tensors(scheme, layer, dtype)
    assert scheme.storage == "compressed-tensors", "the small format of SpQR depends on the outliers it finds"
    return _weight_tensors(scheme, layer, dtype) | _activation_tensors(scheme, dtype)


def _weight_tensors(scheme: QuantizationScheme, layer: LinearLayer, dtype: str) -> dict[str, TensorShape]:
    weights, rows, columns = scheme.weights, layer.out_features, layer.in_features
    scales = scale_shape(scheme, layer)
    scale = {"weight_scale": (scales, weights.scale_dtype or dtype)}
    match scheme.format:
        case "pack-quantized":
            tensors: dict[str, TensorShape] = {"weight_packed": ((rows, ceil(columns * weights.bits / 32)), "int32")}
            tensors |= scale | {"weight_shape": ((2,), "int64")}
            if not weights.symmetric:
                packed = ((ceil(rows * weights.bits / 32), scales[-1]), "int32")
                tensors["weight_zero_point"] = (scales, "int8") if weights.strategy == "tensor" else packed
        case "int-quantized":
            tensors = {"weight": ((rows, columns), "int8")} | scale
            if not weights.symmetric:
                tensors["weight_zero_point"] = (scales, "int8")
        case "nvfp4-pack-quantized":
            tensors = {"weight_packed": ((rows, columns // 2), "uint8")} | scale
            tensors["weight_global_scale"] = ((1,), "float32")
        case "mxfp4-pack-quantized":
            tensors = {"weight_packed": ((rows, columns // 2), "uint8")} | scale
        case _:
            tensors = {"weight": ((rows, columns), "float8_e4m3fn")} | scale
    return tensors


def scale_shape(scheme: QuantizationScheme, layer: LinearLayer) -> tuple[int, ...]:
    """Return the shape of the scales of one weight."""
    weights = scheme.weights
    match weights.strategy:
        case "tensor":
            return (1,)
        case "channel":
            return (layer.out_features, 1)
        case "block":
            assert weights.block_shape is not None
            return (ceil(layer.out_features / weights.block_shape[0]), ceil(layer.in_features / weights.block_shape[1]))
        case _:
            assert weights.group_size is not None
            return (layer.out_features, ceil(layer.in_features / weights.group_size))


def _activation_tensors(scheme: QuantizationScheme, dtype: str) -> dict[str, TensorShape]:
    activations = scheme.activations
    if activations is None:
        return {}
    if activations.strategy == "tensor_group":
        return {"input_global_scale": ((1,), "float32")}
    if activations.dynamic:
        return {}
    tensors: dict[str, TensorShape] = {"input_scale": ((1,), dtype)}
    if not activations.symmetric:
        tensors["input_zero_point"] = ((1,), "int8")
    return tensors


def _bitsandbytes_tensors(scheme: QuantizationScheme, layer: LinearLayer, dtype: str) -> dict[str, TensorShape]:
    """Tensors as bitsandbytes 0.50.2 `QuantState.as_dict` and `Linear8bitLt` name them, without double quantization."""
    rows, columns = layer.out_features, layer.in_features
    if scheme.weights.bits == 8:
        return {
            "weight": ((rows, columns), "int8"),
            "SCB": ((rows,), "float32"),
            "weight_format": ((), "uint8"),
        }
    block = scheme.weights.group_size
    assert block is not None
    described = {"quant_type": "nf4", "blocksize": block, "dtype": dtype, "shape": (rows, columns)}
    return {
        "weight": ((ceil(layer.numel / 2), 1), "uint8"),
        "weight.absmax": ((ceil(layer.numel / block),), "float32"),
        "weight.quant_map": ((16,), "float32"),
        "weight.quant_state.bitsandbytes__nf4": ((len(json.dumps(described)),), "uint8"),
    }


def quantized_tensors(
    scheme: QuantizationScheme,
    layers: Iterable[LinearLayer],
    source: Mapping[str, TensorShape],
    *,
    dtype: str = "bfloat16",
    kept_in_fp32: Collection[str] = (),
) -> dict[str, TensorShape]:
    """Return every tensor of the quantized checkpoint.

    Args:
        scheme: What to quantize, and how.
        layers: Those that are quantized, by their names in the checkpoint.
        source: Tensors of the dense checkpoint, from its headers.
        dtype: Type that the model is loaded in; floating tensors that stay dense are saved in it.
        kept_in_fp32: Tensors that the model's class loads in fp32 whatever their stored type, and saves so.
    """
    tensors = {
        name: (shape, _saved_dtype(stored, "float32" if name in kept_in_fp32 else dtype))
        for name, (shape, stored) in source.items()
    }
    for layer in layers:
        tensors.pop(f"{layer.name}.weight", None)
        for part, tensor in packed_tensors(scheme, layer, dtype).items():
            tensors[f"{layer.name}.{part}"] = tensor
    return tensors


def _saved_dtype(stored: str, dtype: str) -> str:
    return dtype if stored in ("float64", "float32", "bfloat16", "float16") else stored


def checkpoint_bytes(
    scheme: QuantizationScheme,
    layers: Iterable[LinearLayer],
    source: Mapping[str, TensorShape],
    *,
    dtype: str = "bfloat16",
    kept_in_fp32: Collection[str] = (),
) -> int:
    """Return the bytes of all tensors of the quantized checkpoint; file headers come on top.

    Args:
        scheme: What to quantize, and how.
        layers: Those that are quantized, by their names in the checkpoint.
        source: Tensors of the dense checkpoint, from its headers.
        dtype: Type that the model is loaded in.
        kept_in_fp32: As for `quantized_tensors`.
    """
    return tensor_bytes(quantized_tensors(scheme, layers, source, dtype=dtype, kept_in_fp32=kept_in_fp32).values())


def bits_per_weight(scheme: QuantizationScheme, layers: Sequence[LinearLayer], *, dtype: str = "bfloat16") -> float:
    """Return the stored bits for each weight of quantized layers, scales and zero points included.

    >>> bits_per_weight(scheme_named("W4A16"), [LinearLayer(name="up", out_features=4096, in_features=4096)])
    4.125007629394531
    """
    stored = sum(tensor_bytes(packed_tensors(scheme, layer, dtype).values()) for layer in layers)
    return 8 * stored / max(1, sum(layer.numel for layer in layers))
