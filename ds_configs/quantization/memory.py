"""Peak host and device memory of a quantization run, before it starts, in named terms.

The run that is counted is llm-compressor 0.14.0.1's sequential pipeline: decoder layers pass one after another, the
inputs of the next one lie in host memory for every sample, and one layer's weights are on the device. Without an
accelerator everything lies in host memory. With T = batch_size · seq_len tokens of a forward pass, N samples, and d
bytes of the model's type:

    layer_inputs        (N + batch) · seq_len · hidden · d, the rotary tables of each batch, and masks of seq_len² · d,
                        which calibration makes for every sample because it runs eager attention
    hessians            Σ in² · 4 over the matrices of one layer, each its own (`modifiers/gptq/base.py`)
    hessian_copies      one matrix: 3 · in² · 4 while its columns are sorted (`modifiers/gptq/helpers.py`)
    awq_inputs          N · seq_len · (inputs of attention, MLP and every scaled projection) · d
    awq_attention       N · heads · seq_len² · d: outputs of attention are kept with its scores (`awq/base.py:638`)
    attention           heads · batch · seq_len² · (4 + 2 · d): scores in eager attention, softmax in fp32
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

from ..dimensions import Dimensions
from .layers import LinearLayer, selected_layers
from .methods import MethodName, needs_calibration
from .scheme import QuantizationScheme
from .sizes import DTYPE_BYTES, packed_tensors, scale_shape, tensor_bytes

Terms = dict[str, int]
Device = Literal["cpu", "cuda"]

PROCESS_BYTES = 900 * 10**6
"""Resident memory of Python with torch, Transformers and llm-compressor, measured on a CPU-only Linux host."""
_BLOCK = re.compile(r"^(.*?\.\d+)\.")
_GPTQ_BLOCK_COLUMNS = 128


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
        """What tensors take, host and device together: all but the process itself."""
        return self.peak_host_bytes + self.peak_device_bytes - self.host_terms.get("process", 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """What every term is computed from."""

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
        layers: Every linear layer of the model, experts one by one.
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
        chosen=selected_layers(scheme, layers),
        scheme=scheme,
        method=method,
        dimensions=dimensions,
        weight_bytes=weight_bytes,
        num_samples=num_samples,
        seq_len=seq_len,
        batch_size=min(batch_size, max(1, num_samples)),
        width=DTYPE_BYTES[dtype],
        dtype=dtype,
    )
    kept: Terms = {"process": PROCESS_BYTES, "model_weights": weight_bytes, "scales": _scale_bytes(run)}
    phases: dict[str, tuple[Terms, Terms]] = {"saving": (kept | {"packing": _packing_bytes(run)}, {})}
    if method == "bitsandbytes":
        packed = sum(tensor_bytes(packed_tensors(scheme, layer, dtype).values()) for layer in run.chosen)
        phases = {"loading": (kept | {"packed_weights": packed}, {})}
    elif needs_calibration(method, scheme):
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
    grouped = 2 if sizes.num_key_value_heads != sizes.num_attention_heads else 0
    projections = (3 + grouped) * sizes.query_size + 4 * sizes.key_value_size
    softmax = statistics | {
        "attention": run.scores * (4 + 2 * run.width) + tokens * (2 * sizes.hidden_size + projections) * run.width
    }
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
    for index, layer in enumerate(run.block):
        square, weight = 4 * layer.in_features**2, 4 * layer.numel
        columns = 5 * 4 * layer.out_features * _GPTQ_BLOCK_COLUMNS
        sorting: Terms = {"hessian_copies": 3 * square, "fp32_weights": weight}
        correcting: Terms = {"hessian_copies": square, "fp32_weights": 2 * weight + columns}
        fuller = max(sorting, correcting, key=lambda terms: sum(terms.values()))
        moments.append({"hessians": sum(waiting[index + 1 :])} | fuller)
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
    """Search of attention's scales: outputs of all samples before and after rounding, with the attention scores."""
    sizes, tokens = run.dimensions, run.tokens
    batches = ceil(run.num_samples / run.batch_size)
    clones = [layer for layer in run.block if layer.name.endswith(("q_proj", "k_proj", "v_proj", "qkv_proj"))]
    return {
        "awq_inputs": _awq_input_bytes(run),
        "awq_outputs": 2 * batches * tokens * sizes.hidden_size * run.width,
        "awq_attention": (batches - 1) * run.scores * run.width,
        "attention": run.scores * (4 + 2 * run.width)
        + tokens * (5 * sizes.query_size + 4 * sizes.key_value_size) * run.width,
        "awq_weights": sum(layer.numel for layer in clones) * run.width,
    }


def _autoround(run: _Run) -> Terms:
    """Rounding, its gradient and the best so far in fp32, and the layer's outputs; read in the source."""
    elements = sum(layer.numel for layer in run.block)
    outputs = run.num_samples * run.seq_len * run.dimensions.hidden_size * run.width
    return {"learned_rounding": 3 * 4 * elements, "layer_outputs": 2 * outputs}
