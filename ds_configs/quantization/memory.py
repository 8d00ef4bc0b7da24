"""Peak host and device memory of a quantization run, before it starts, in named terms.

The run that is counted is llm-compressor 0.14.0.1's sequential pipeline: decoder layers pass one after another, the
inputs of the next one lie in host memory for every sample, and one layer's weights are on the device. Without an
accelerator everything lies in host memory. With T = batch_size · seq_len tokens of a forward pass, N samples, and d
bytes of the model's type:

    layer_inputs        (N + batch) · seq_len · hidden · d, the rotary tables of each batch, and masks of seq_len² · d,
                        which calibration makes for every sample because it runs eager attention
    hessians            Σ in² · 4 over the matrices of one layer, each its own (`modifiers/gptq/base.py`)
    hessian_copies      one matrix: 3 · in² · 4 while it is stacked and while its columns are sorted, beside what the
                        matrix before left (`modifiers/gptq/helpers.py`, `base.py:290`)
    small_format        Σ weights · (bits + 1) / 8: what SpQR and low-rank correction have finished
    awq_inputs          N · seq_len · (inputs of attention, MLP and every scaled projection) · d
    attention           heads · batch · seq_len² · (8 + d): scores in eager attention, and their softmax in fp32, which
                        CUDA fuses with the conversion: (4 + 2 · d)
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

from ..specs.dimensions import Dimensions
from .layers import LinearLayer
from .methods import METHODS, MethodName, needs_calibration
from .scheme import QuantizationScheme
from .sizes import DTYPE_BYTES, packed_tensors, scale_shape, tensor_bytes

Terms = dict[str, int]
Device = Literal["cpu", "cuda"]

PROCESS_BYTES = 700 * 10**6
"""Resident memory of Python with torch, Transformers and llm-compressor: 665 MB at the peak of a tiny GPTQ run on a
CPU-only Linux host, rounded up; drivers of an accelerator come on top."""
_BLOCK = re.compile(r"^(.*?\.\d+)\.")
# GPTQModifier's default `block_size`; five fp32 copies of one block of columns live while it is quantized.
_GPTQ_BLOCK_COLUMNS = 128
_ATTENTION_INPUTS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value")
_MLP_INPUTS = ("gate_proj", "up_proj", "gate_up_proj", "fc1", ".w1", ".w3")
_AWQ_ROUNDING_BYTES = 10
"""Temporaries for each weight while the search rounds a matrix, as metered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizationMemory:
    """Bytes that a run needs at its fullest moment."""

    host_terms: Mapping[str, int]
    """What makes up the host's peak, by name."""
    device_terms: Mapping[str, int]
    """What makes up the accelerator's peak, by name; empty without one."""
    phase: str
    """The moment of the peak, the device's where there is one: `loading`, `calibrating`, `quantizing` or `saving`."""

    @property
    def peak_host_bytes(self) -> int:
        """Host memory at its fullest."""
        return sum(self.host_terms.values())

    @property
    def peak_device_bytes(self) -> int:
        """Memory of the accelerator at its fullest; 0 without one."""
        return sum(self.device_terms.values())

    @property
    def tensor_bytes(self) -> int:
        """Bytes of tensors, host and device together: all but the process itself."""
        return self.peak_host_bytes + self.peak_device_bytes - self.host_terms.get("process", 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """Quantities from which every term is computed."""

    chosen: tuple[LinearLayer, ...]
    scheme: QuantizationScheme
    method: MethodName
    dimensions: Dimensions
    weight_bytes: int
    num_samples: int
    seq_len: int
    batch_size: int
    width: int
    dtype: str
    device: Device

    @property
    def tokens(self) -> int:
        return self.batch_size * self.seq_len

    @property
    def block(self) -> list[LinearLayer]:
        """The chosen matrices of the decoder layer that holds most of them."""
        blocks: dict[str, list[LinearLayer]] = defaultdict(list)
        for layer in self.chosen:
            found = _BLOCK.match(layer.name)
            if found:
                blocks[found[1]].append(layer)
        return max(blocks.values(), key=lambda block: sum(layer.in_features**2 for layer in block), default=[])

    @property
    def scores(self) -> int:
        """Elements of the attention scores of one forward pass."""
        return self.dimensions.num_attention_heads * self.batch_size * self.seq_len**2

    @property
    def softmax_bytes(self) -> int:
        """Scores, queries, keys and values at the softmax of one forward pass; shared heads are repeated."""
        sizes = self.dimensions
        each = 8 + self.width if self.device == "cpu" else 4 + 2 * self.width
        repeated = 2 * sizes.query_size if sizes.num_key_value_heads != sizes.num_attention_heads else 0
        columns = sizes.query_size + 2 * sizes.key_value_size + repeated
        return self.scores * each + self.tokens * columns * self.width


def estimate_quantization_memory(
    *,
    layers: Sequence[LinearLayer],
    scheme: QuantizationScheme,
    method: MethodName,
    dimensions: Dimensions,
    weight_bytes: int,
    num_samples: int,
    seq_len: int,
    batch_size: int = 1,
    device: Device = "cpu",
    dtype: str = "bfloat16",
) -> QuantizationMemory:
    """Return the peak memory of a run, with what makes it up.

    Args:
        layers: Matrices that are quantized, experts one by one.
        scheme: What to quantize, and how.
        method: A key of `METHODS`.
        dimensions: Sizes of the decoder.
        weight_bytes: All parameters in the type they are loaded in, tied ones once.
        num_samples: Calibration samples.
        seq_len: Tokens of each, at most.
        batch_size: Samples of one forward pass.
        device: `cuda` moves one layer at a time to an accelerator.
        dtype: Type of the model's weights.
    """
    run = _Run(
        chosen=tuple(layers),
        scheme=scheme,
        method=method,
        dimensions=dimensions,
        weight_bytes=weight_bytes,
        num_samples=num_samples,
        seq_len=seq_len,
        batch_size=min(batch_size, max(1, num_samples)),
        width=DTYPE_BYTES[dtype],
        dtype=dtype,
        device=device,
    )
    kept: Terms = {"process": PROCESS_BYTES, "model_weights": weight_bytes, "scales": _scale_bytes(run)}
    phases: dict[str, tuple[Terms, Terms]] = {"saving": (kept | {"packing": _packing_bytes(run)}, {})}
    if method == "bitsandbytes":
        packed = sum(tensor_bytes(packed_tensors(scheme, layer, dtype).values()) for layer in run.chosen)
        phases = {"loading": (kept | {"packed_weights": packed}, {})}
    elif needs_calibration(method, scheme):
        if METHODS[method].engine == "shardwright":
            kept["small_format"] = sum(layer.numel for layer in run.chosen) * (scheme.weights.bits + 1) // 8
        cached = kept | {"tokens": 16 * num_samples * seq_len, "layer_inputs": _layer_input_bytes(run)}
        phases["calibrating"] = cached, _calibrating(run)
        phases["quantizing"] = cached, _quantizing(run)
    return _fullest(phases, device, onloaded=_onloaded_bytes(run))


def _fullest(phases: Mapping[str, tuple[Terms, Terms]], device: Device, *, onloaded: int) -> QuantizationMemory:
    if device == "cpu":
        name, (host, working) = max(
            phases.items(), key=lambda item: sum(item[1][0].values()) + sum(item[1][1].values())
        )
        return QuantizationMemory(host_terms=_positive(host | working), device_terms={}, phase=name)
    host = max((host for host, _ in phases.values()), key=lambda terms: sum(terms.values()))
    name, (_, working) = max(phases.items(), key=lambda item: sum(item[1][1].values()))
    terms = {"layer_weights": onloaded} | working
    return QuantizationMemory(host_terms=_positive(host), device_terms=_positive(terms), phase=name)


def _positive(terms: Terms) -> Terms:
    return {name: count for name, count in terms.items() if count}


def _scale_bytes(run: _Run) -> int:
    """Scales in the model's type and int8 zero points, which exist for symmetric schemes too until they are saved."""
    elements = 0
    for layer in run.chosen:
        count = 1
        for size in scale_shape(run.scheme, layer):
            count *= size
        elements += count + run.scheme.activations_are_static
    return elements * (run.width + 1)


def _packing_bytes(run: _Run) -> int:
    """Temporaries of the largest matrix: codes of one byte, then two int32 copies while they are packed."""
    largest = max((layer.numel for layer in run.chosen), default=0)
    each = 9 if run.scheme.format == "pack-quantized" else 2 * run.width + 1
    return each * largest


def _onloaded_bytes(run: _Run) -> int:
    """Weights on the device at once: one decoder layer, or the token embedding where that is larger."""
    block = sum(layer.numel for layer in run.block)
    return max(block, run.dimensions.vocab_size * run.dimensions.hidden_size) * run.width


def _layer_input_bytes(run: _Run) -> int:
    sizes, batches = run.dimensions, ceil(run.num_samples / run.batch_size) + 1
    hidden = run.tokens * sizes.hidden_size
    rotary = 2 * run.seq_len * sizes.head_dim
    mask = run.batch_size * run.seq_len**2
    return batches * (hidden + rotary + mask) * run.width


def _calibrating(run: _Run) -> Terms:
    """The fuller of two moments of a decoder layer's forward pass: softmax, and the last projection's statistics."""
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


def _quantizing(run: _Run) -> Terms:
    if run.method == "awq":
        return _awq_search(run)
    if run.method == "autoround":
        return _autoround(run)
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
            # What the matrix before left lives until its names are bound again.
            {"hessians": left + square_before, "hessian_copies": 3 * square, "fp32_weights": 2 * weight_before},
            {"hessians": left, "hessian_copies": 3 * square, "fp32_weights": weight + weight_before},
            {"hessians": left, "hessian_copies": square, "fp32_weights": 2 * weight + columns + weight_before},
        ]
        square_before, weight_before = square, weight
    return max(moments, key=lambda terms: sum(terms.values()), default={})


def _awq_input_bytes(run: _Run) -> int:
    """Inputs of attention and MLP, of the down projection, and of the output projection where heads are not shared."""
    sizes, block = run.dimensions, run.block
    columns = 2 * sizes.hidden_size
    columns += sum(layer.in_features for layer in block if layer.name.endswith(("down_proj", "fc2")))
    if sizes.num_key_value_heads == sizes.num_attention_heads:
        columns += sizes.query_size
    return run.num_samples * run.seq_len * columns * run.width


def _awq_search(run: _Run) -> Terms:
    """The fuller of two moments: attention's outputs of all samples, and the MLP's weights while they are rounded.

    Scales are judged by the outputs of all samples before and after rounding.
    Inputs of attention are freed before the MLP's turn.
    """
    sizes, tokens, block = run.dimensions, run.tokens, run.block
    batches = ceil(run.num_samples / run.batch_size)
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


def _autoround(run: _Run) -> Terms:
    """Rounding, its gradient and the best so far in fp32, and the layer's outputs; an estimate that was not metered."""
    elements = sum(layer.numel for layer in run.block)
    outputs = run.num_samples * run.seq_len * run.dimensions.hidden_size * run.width
    return {"learned_rounding": 3 * 4 * elements, "layer_outputs": 2 * outputs}
