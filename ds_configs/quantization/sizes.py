"""Bytes of a quantized checkpoint, and peak memory of the quantization."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Literal

from ..specs.model import Dimensions
from .layers import LinearLayer
from .scheme import METHODS, MethodName, QuantizationScheme, needs_calibration

TensorShape = tuple[tuple[int, ...], str]
"""Shape and dtype of a tensor; dtypes have torch's names, such as `bfloat16`."""


def dtype_bytes(dtype: str) -> int:
    """Return the bytes of an element of a torch dtype.

    >>> dtype_bytes("bfloat16"), dtype_bytes("float8_e4m3fn"), dtype_bytes("bool")
    (2, 1, 1)
    """
    bits = re.search(r"\d+", dtype)
    return 1 if bits is None else max(1, int(bits[0]) // 8)


def tensor_bytes(tensors: Iterable[TensorShape]) -> int:
    return sum(prod(shape) * dtype_bytes(dtype) for shape, dtype in tensors)


def packed_tensors(scheme: QuantizationScheme, layer: LinearLayer, dtype: str = "bfloat16") -> dict[str, TensorShape]:
    """Return the tensors of a layer's quantized weight and ranges, by the last part of their names.

    The bias is not included, because it is not quantized.

    >>> packed_tensors(scheme_named("W4A16"), LinearLayer(name="q_proj", out_features=256, in_features=256))
    {'weight_packed': ((256, 32), 'int32'), 'weight_scale': ((256, 2), 'bfloat16'), 'weight_shape': ((2,), 'int64')}
    """
    weights, rows, columns = scheme.weights, layer.out_features, layer.in_features
    if scheme.storage == "bitsandbytes":
        # Named as in bitsandbytes 0.50.2 `QuantState.as_dict` and `Linear8bitLt`, without double quantization.
        if weights.bits == 8:
            return {"weight": ((rows, columns), "int8"), "SCB": ((rows,), "float32"), "weight_format": ((), "uint8")}
        block = weights.group_size
        assert block is not None
        described = {"quant_type": "nf4", "blocksize": block, "dtype": dtype, "shape": (rows, columns)}
        return {
            "weight": ((ceil(layer.numel / 2), 1), "uint8"),
            "weight.absmax": ((ceil(layer.numel / block),), "float32"),
            "weight.quant_map": ((16,), "float32"),
            "weight.quant_state.bitsandbytes__nf4": ((len(json.dumps(described)),), "uint8"),
        }
    assert scheme.storage == "compressed-tensors", "the size of SpQR depends on its outliers"
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
    activations = scheme.activations
    if activations is not None and activations.strategy == "tensor_group":
        tensors["input_global_scale"] = ((1,), "float32")
    elif activations is not None and not activations.dynamic:
        tensors["input_scale"] = ((1,), dtype)
        if not activations.symmetric:
            tensors["input_zero_point"] = ((1,), "int8")
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


def quantized_tensors(
    scheme: QuantizationScheme,
    layers: Iterable[LinearLayer],
    source: Mapping[str, TensorShape],
    *,
    dtype: str = "bfloat16",
    kept_in_fp32: Collection[str] = (),
) -> dict[str, TensorShape]:
    """Return every tensor of the quantized checkpoint."""
    floating = ("float64", "float32", "bfloat16", "float16")
    tensors = {}
    for name, (shape, stored) in source.items():
        saved = "float32" if name in kept_in_fp32 else dtype
        tensors[name] = (shape, saved if stored in floating else stored)
    for layer in layers:
        tensors.pop(f"{layer.name}.weight", None)
        for part, tensor in packed_tensors(scheme, layer, dtype).items():
            tensors[f"{layer.name}.{part}"] = tensor
    return tensors


def bits_per_weight(scheme: QuantizationScheme, layers: Sequence[LinearLayer], *, dtype: str = "bfloat16") -> float:
    """Return the stored bits per weight of quantized layers, including scales and zero points.

    >>> bits_per_weight(scheme_named("W4A16"), [LinearLayer(name="up", out_features=4096, in_features=4096)])
    4.125007629394531
    """
    stored = sum(tensor_bytes(packed_tensors(scheme, layer, dtype).values()) for layer in layers)
    return 8 * stored / max(1, sum(layer.numel for layer in layers))


Terms = dict[str, int]
Device = Literal["cpu", "cuda"]

PROCESS_BYTES = 700 * 10**6
"""Resident memory of Python with torch, Transformers and llm-compressor: 665 MB at the peak of a tiny GPTQ run on a
CPU-only Linux host, rounded up, without drivers of an accelerator."""
_BLOCK = re.compile(r"^(.*?\.\d+)\.")
# Default `block_size` of GPTQModifier; quantizing a block of columns needs five fp32 copies of it.
_GPTQ_BLOCK_COLUMNS = 128
_ATTENTION_INPUTS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value")
_MLP_INPUTS = ("gate_proj", "up_proj", "gate_up_proj", "fc1", ".w1", ".w3")
_AWQ_ROUNDING_BYTES = 10
"""Measured temporary bytes per weight while the search rounds a matrix."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizationMemory:
    host_terms: Mapping[str, int]
    device_terms: Mapping[str, int]
    """Named parts of the accelerator's peak; empty without one."""
    phase: str
    """Phase of the peak (of the device, if any): `loading`, `calibrating`, `quantizing` or `saving`."""

    @property
    def peak_host_bytes(self) -> int:
        return sum(self.host_terms.values())

    @property
    def peak_device_bytes(self) -> int:
        return sum(self.device_terms.values())

    @property
    def tensor_bytes(self) -> int:
        """Bytes of tensors on host and device together, without the process itself."""
        return self.peak_host_bytes + self.peak_device_bytes - self.host_terms.get("process", 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizationRun:
    """One quantization of a model, whose peak memory is predicted."""

    layers: Sequence[LinearLayer]
    scheme: QuantizationScheme
    method: MethodName
    dimensions: Dimensions
    weight_bytes: int
    num_samples: int
    seq_len: int
    batch_size: int = 1
    device: Device = "cpu"
    dtype: str = "bfloat16"

    @property
    def batch(self) -> int:
        """Samples per forward pass."""
        return min(self.batch_size, max(1, self.num_samples))

    @property
    def width(self) -> int:
        """Bytes of a number of the model."""
        return dtype_bytes(self.dtype)

    @property
    def tokens(self) -> int:
        return self.batch * self.seq_len

    @property
    def block(self) -> list[LinearLayer]:
        """The matrices of the largest decoder layer."""
        blocks: dict[str, list[LinearLayer]] = defaultdict(list)
        for layer in self.layers:
            match = _BLOCK.match(layer.name)
            if match:
                blocks[match[1]].append(layer)
        return max(blocks.values(), key=lambda block: sum(layer.in_features**2 for layer in block), default=[])

    @property
    def scores(self) -> int:
        return self.dimensions.num_attention_heads * self.batch * self.seq_len**2

    @property
    def softmax_bytes(self) -> int:
        """Bytes of scores, queries, keys and values during softmax; grouped key/value heads are repeated."""
        sizes = self.dimensions
        each = 8 + self.width if self.device == "cpu" else 4 + 2 * self.width
        repeated = 2 * sizes.query_size if sizes.num_key_value_heads != sizes.num_attention_heads else 0
        columns = sizes.query_size + 2 * sizes.key_value_size + repeated
        return self.scores * each + self.tokens * columns * self.width

    def memory(self) -> QuantizationMemory:
        """Return the peak memory and its named parts."""
        # Scales in the model's dtype and int8 zero points, which exist for symmetric schemes too until they are saved.
        elements = sum(
            prod(scale_shape(self.scheme, layer)) + self.scheme.activations_are_static for layer in self.layers
        )
        kept: Terms = {
            "process": PROCESS_BYTES,
            "model_weights": self.weight_bytes,
            "scales": elements * (self.width + 1),
        }
        # Packing the largest matrix needs its one-byte codes, then two int32 copies.
        packing = 9 if self.scheme.format == "pack-quantized" else 2 * self.width + 1
        packing *= max((layer.numel for layer in self.layers), default=0)
        phases: dict[str, tuple[Terms, Terms]] = {"saving": (kept | {"packing": packing}, {})}
        if self.method == "bitsandbytes":
            packed = sum(tensor_bytes(packed_tensors(self.scheme, layer, self.dtype).values()) for layer in self.layers)
            phases = {"loading": (kept | {"packed_weights": packed}, {})}
        elif needs_calibration(self.method, self.scheme):
            if METHODS[self.method].engine == "shardwright":
                kept["small_format"] = sum(layer.numel for layer in self.layers) * (self.scheme.weights.bits + 1) // 8
            batches = ceil(self.num_samples / self.batch) + 1
            hidden, rotary = self.tokens * self.dimensions.hidden_size, 2 * self.seq_len * self.dimensions.head_dim
            layer_inputs = batches * (hidden + rotary + self.batch * self.seq_len**2) * self.width
            cached = kept | {"tokens": 16 * self.num_samples * self.seq_len, "layer_inputs": layer_inputs}
            phases["calibrating"] = cached, _calibrating(self)
            phases["quantizing"] = cached, _quantizing(self)
        if self.device == "cpu":
            name, (host, working) = max(
                phases.items(), key=lambda item: sum(item[1][0].values()) + sum(item[1][1].values())
            )
            return QuantizationMemory(host_terms=_positive(host | working), device_terms={}, phase=name)
        host = max((host for host, _ in phases.values()), key=lambda terms: sum(terms.values()))
        name, (_, working) = max(phases.items(), key=lambda item: sum(item[1][1].values()))
        # The device holds one decoder layer, or the token embedding if that is larger.
        onloaded = max(
            sum(layer.numel for layer in self.block), self.dimensions.vocab_size * self.dimensions.hidden_size
        )
        terms = {"layer_weights": onloaded * self.width} | working
        return QuantizationMemory(host_terms=_positive(host), device_terms=_positive(terms), phase=name)


def _positive(terms: Terms) -> Terms:
    return {name: count for name, count in terms.items() if count}


def _calibrating(run: QuantizationRun) -> Terms:
    """The larger of two moments of a decoder layer's forward pass: softmax, and statistics of the last projection."""
    sizes, tokens = run.dimensions, run.tokens
    statistics: Terms = {}
    if run.method in ("gptq", "smoothquant-gptq", "spqr", "low-rank"):
        statistics["hessians"] = sum(4 * layer.in_features**2 for layer in run.block)
    if run.method == "awq":
        statistics["awq_inputs"] = _awq_input_bytes(run)
    softmax = statistics | {"attention": run.softmax_bytes + tokens * sizes.hidden_size * run.width}
    widest = max((layer.in_features for layer in run.block), default=sizes.hidden_size)
    last = statistics | {
        "attention": run.scores * run.width,
        "mlp": tokens * (max(widest, sizes.intermediate_size) + 4 * sizes.hidden_size) * run.width,
    }
    if "hessians" in statistics:
        last["hessian_update"] = 4 * max(widest**2 + tokens * widest, 2 * tokens * widest)
    elif run.scheme.activations_are_static:
        last["range_search"] = tokens * widest * run.width
    return max(softmax, last, key=lambda terms: sum(terms.values()))


def _quantizing(run: QuantizationRun) -> Terms:
    if run.method == "awq":
        # The larger of two moments: attention outputs of all samples, and the MLP's weights while they are rounded. The
        # search compares the outputs of all samples before and after. Inputs of attention are freed before the MLP.
        sizes, tokens, block = run.dimensions, run.tokens, run.block
        batches = ceil(run.num_samples / run.batch)
        outputs, inputs = batches * tokens * sizes.hidden_size * run.width, _awq_input_bytes(run)
        attention: Terms = {
            "awq_inputs": inputs,
            "awq_outputs": 2 * outputs - tokens * sizes.hidden_size * run.width,
            "attention": run.softmax_bytes,
            "awq_weights": sum(layer.numel for layer in block if layer.name.endswith(_ATTENTION_INPUTS)) * run.width,
        }
        scaled = [layer for layer in block if layer.name.endswith(_MLP_INPUTS)]
        mlp: Terms = {
            "awq_inputs": inputs - batches * tokens * sizes.hidden_size * run.width,
            "awq_outputs": outputs,
            "awq_weights": sum(layer.numel for layer in scaled) * run.width,
            "rounding": _AWQ_ROUNDING_BYTES * max((layer.numel for layer in scaled), default=0),
        }
        return max(attention, mlp, key=lambda terms: sum(terms.values()))
    if run.method not in ("gptq", "smoothquant-gptq", "spqr", "low-rank"):
        return {}
    moments = []
    waiting = [4 * layer.in_features**2 for layer in run.block]
    square_before = weight_before = 0
    for index, layer in enumerate(run.block):
        square, weight = 4 * layer.in_features**2, 4 * layer.numel
        columns = 5 * 4 * layer.out_features * _GPTQ_BLOCK_COLUMNS
        left = sum(waiting[index + 1 :])
        moments += [
            # Tensors of the previous matrix exist until their variables are assigned again.
            {"hessians": left + square_before, "hessian_copies": 3 * square, "fp32_weights": 2 * weight_before},
            {"hessians": left, "hessian_copies": 3 * square, "fp32_weights": weight + weight_before},
            {"hessians": left, "hessian_copies": square, "fp32_weights": 2 * weight + columns + weight_before},
        ]
        square_before, weight_before = square, weight
    return max(moments, key=lambda terms: sum(terms.values()), default={})


def _awq_input_bytes(run: QuantizationRun) -> int:
    """Inputs of attention and MLP, of the down projection, and of the output projection if heads are not grouped."""
    sizes, block = run.dimensions, run.block
    columns = 2 * sizes.hidden_size
    columns += sum(layer.in_features for layer in block if layer.name.endswith(("down_proj", "fc2")))
    if sizes.num_key_value_heads == sizes.num_attention_heads:
        columns += sizes.query_size
    return run.num_samples * run.seq_len * columns * run.width
