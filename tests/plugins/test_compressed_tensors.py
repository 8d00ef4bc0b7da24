"""Codes, scales and packing are compressed-tensors' own, bit for bit."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization.lifecycle.forward import dequantize as upstream_dequantize
from compressed_tensors.quantization.lifecycle.forward import quantize as upstream_quantize
from compressed_tensors.quantization.utils import calculate_qparams
from hypothesis import given, settings
from hypothesis import strategies as st
from shardwright.ds_configs.quantization.scheme import QuantizationScheme, WeightQuantization
from shardwright.plugins.compressed_tensors import (
    RoundedWeight,
    pack_tensors,
    to_upstream,
    unpack_tensors,
    weight_levels,
    weight_scale_and_zero_point,
)

GROUP = 16


def quantization(bits, symmetric, strategy):
    return WeightQuantization(
        bits=bits, symmetric=symmetric, strategy=strategy, group_size=GROUP if strategy == "group" else None
    )


def upstream_parameters(weight, asked):
    """Scales and zero points by upstream's own function, from ranges found here by plain slices."""
    arguments = to_upstream(QuantizationScheme(name="x", weights=asked)).weights
    shared = {"tensor": weight.reshape(1, -1), "channel": weight, "group": weight.reshape(len(weight), -1, GROUP)}
    values = shared[asked.strategy]
    low, high = values.amin(-1), values.amax(-1)
    if asked.strategy == "channel":
        low, high = low[:, None], high[:, None]
    scale, zero_point = calculate_qparams(low, high, arguments)
    return arguments, scale, zero_point


@settings(max_examples=60, deadline=None)
@given(
    bits=st.integers(2, 8),
    symmetric=st.booleans(),
    strategy=st.sampled_from(["tensor", "channel", "group"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
    spread=st.sampled_from([1e-6, 0.02, 1.0, 300.0]),
)
def test_weights_are_coded_as_upstream_codes_them(bits, symmetric, strategy, dtype, seed, spread):
    draw = torch.Generator().manual_seed(seed)
    weight = (torch.randn(6, 2 * GROUP, generator=draw) * spread).to(dtype)
    weight[2, :GROUP] = 0
    asked = quantization(bits, symmetric, strategy)
    scale, zero_point = weight_scale_and_zero_point(weight, asked)
    arguments, wanted_scale, wanted_zero = upstream_parameters(weight, asked)
    assert torch.equal(scale, wanted_scale.reshape(scale.shape))
    assert (zero_point is None) == symmetric
    if zero_point is not None:
        assert torch.equal(zero_point, wanted_zero.reshape(zero_point.shape).to(torch.int8))
    codes = weight_levels(weight, scale, zero_point, asked).to(torch.int8)
    given_zero = torch.zeros_like(wanted_scale, dtype=torch.int8) if symmetric else wanted_zero
    wanted = upstream_quantize(weight, wanted_scale, given_zero, arguments, dtype=torch.int8)
    assert torch.equal(codes, wanted)
    back = upstream_dequantize(wanted, wanted_scale, given_zero, arguments)
    value = RoundedWeight(codes=codes, scale=scale, zero_point=zero_point).value(asked)
    assert torch.equal(value, back.to(scale.dtype))


def test_a_scale_is_rounded_before_codes_are_made():
    """7.3 / 7.5 is 0.97333, in bf16 0.97265625: 3.4065 is 3.4998 of the first and 3.5023 of the second."""
    weight = torch.zeros(1, GROUP)
    weight[0, 0], weight[0, 1] = 7.3, 3.4065
    asked = quantization(4, True, "group")
    scale, _ = weight_scale_and_zero_point(weight, asked, torch.bfloat16)
    assert scale.dtype == torch.bfloat16 and scale.item() == 0.97265625
    exact, _ = weight_scale_and_zero_point(weight, asked)
    assert exact.item() == pytest.approx(7.3 / 7.5, rel=1e-7)
    assert weight_levels(weight, exact, None, asked)[0, 1] == 3
    assert weight_levels(weight, scale, None, asked)[0, 1] == 4


@settings(max_examples=40, deadline=None)
@given(
    bits=st.integers(2, 8),
    symmetric=st.booleans(),
    strategy=st.sampled_from(["channel", "group"]),
    rows=st.integers(1, 9),
    seed=st.integers(0, 1000),
)
def test_packing_comes_back(bits, symmetric, strategy, rows, seed):
    weight = torch.randn(rows, 3 * GROUP, generator=torch.Generator().manual_seed(seed)).bfloat16()
    scheme = QuantizationScheme(name="x", weights=quantization(bits, symmetric, strategy))
    scale, zero_point = weight_scale_and_zero_point(weight, scheme.weights)
    codes = weight_levels(weight, scale, zero_point, scheme.weights)
    tensors = pack_tensors("layer", RoundedWeight(codes=codes, scale=scale, zero_point=zero_point), scheme)
    assert tensors["layer.weight_packed"].dtype == torch.int32
    assert tensors["layer.weight_packed"].shape == (rows, -(-3 * GROUP * bits // 32))
    found = unpack_tensors("layer", tensors, scheme)
    assert torch.equal(found.codes, codes.to(torch.int8)) and torch.equal(found.scale, scale)
    assert symmetric or torch.equal(found.zero_point, zero_point)
