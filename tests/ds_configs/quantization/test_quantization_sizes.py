"""Computed tensors against those that compressed-tensors and bitsandbytes really write."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from compressed_tensors.compressors import compress_module
from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, apply_quantization_config
from compressed_tensors.quantization import QuantizationScheme as UpstreamScheme
from compressed_tensors.quantization.lifecycle.initialize import initialize_module_for_quantization
from hypothesis import given, settings
from hypothesis import strategies as st
from shardwright.ds_configs.quantization.layers import (
    LinearLayer,
    config_group,
    quantization_config,
    scheme_errors,
    selected_layers,
)
from shardwright.ds_configs.quantization.scheme import PRESETS, QuantizationScheme, changed
from shardwright.ds_configs.quantization.sizes import (
    packed_tensors,
    quantized_tensors,
)
from transformers import LlamaConfig, LlamaForCausalLM

COMPRESSED = [name for name, scheme in PRESETS.items() if scheme.storage == "compressed-tensors"]


def stored(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors.items()}


def compressed_linear(scheme: QuantizationScheme, rows: int, columns: int, dtype: torch.dtype):
    """One real linear layer, its scales made from its weight's largest value, after the real compressor."""
    linear = torch.nn.Linear(columns, rows, bias=False, dtype=dtype)
    initialize_module_for_quantization(linear, UpstreamScheme.model_validate(config_group(scheme)))
    for name, parameter in linear.named_parameters():
        if name.endswith("scale"):
            parameter.data.fill_(0.01)
    linear.quantization_status = QuantizationStatus.FROZEN
    compress_module(linear)
    return stored(linear.state_dict())


@pytest.mark.parametrize("name", COMPRESSED)
@pytest.mark.parametrize(("rows", "columns"), [(40, 256), (200, 384)])
def test_every_preset_has_the_tensors_that_upstream_writes(name, rows, columns):
    layer = LinearLayer(name="x", out_features=rows, in_features=columns)
    expected = compressed_linear(PRESETS[name], rows, columns, torch.bfloat16)
    assert packed_tensors(PRESETS[name], layer) == expected


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["W4A16", "W8A8", "W8A8_STATIC", "W4A8"]),
    bits=st.integers(2, 8),
    symmetric=st.booleans(),
    group_size=st.sampled_from([None, -1, 16, 32]),
    rows=st.integers(1, 70),
    groups=st.integers(1, 4),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
)
def test_changed_schemes_have_the_tensors_that_upstream_writes(name, bits, symmetric, group_size, rows, groups, dtype):
    scheme = changed(PRESETS[name], symmetric=symmetric, group_size=group_size)
    scheme = replace(scheme, weights=replace(scheme.weights, bits=bits))
    layer = LinearLayer(name="x", out_features=rows, in_features=groups * (scheme.weights.group_size or 24))
    computed = packed_tensors(scheme, layer, str(dtype).removeprefix("torch."))
    assert computed == compressed_linear(scheme, rows, layer.in_features, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_normal_floats_have_the_tensors_that_bitsandbytes_writes(dtype):
    import bitsandbytes

    linear = bitsandbytes.nn.Linear4bit(
        256, 40, bias=False, quant_type="nf4", compress_statistics=False, compute_dtype=dtype
    )
    linear.weight.data = torch.randn(40, 256, dtype=dtype)
    linear = linear.to("cpu")
    layer = LinearLayer(name="x", out_features=40, in_features=256)
    assert packed_tensors(PRESETS["NF4"], layer, str(dtype).removeprefix("torch.")) == stored(linear.state_dict())


def test_eight_bit_rows_have_the_tensors_that_bitsandbytes_writes():
    import bitsandbytes

    linear = bitsandbytes.nn.Linear8bitLt(256, 40, bias=False, has_fp16_weights=False)
    linear.weight.data = torch.randn(40, 256, dtype=torch.float16)
    linear = linear.to("cpu")
    layer = LinearLayer(name="x", out_features=40, in_features=256)
    computed = packed_tensors(PRESETS["BNB_INT8"], layer)
    assert {name: computed[name] for name in stored(linear.state_dict())} == stored(linear.state_dict())


@pytest.mark.parametrize("name", ["W4A16", "W4A16_ASYM", "W8A8_STATIC", "NVFP4", "FP8_BLOCK"])
@pytest.mark.parametrize("tied", [False, True])
def test_checkpoint_has_computed_tensors_and_bytes(name, tied):
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    layers = [
        LinearLayer(name=name, out_features=module.out_features, in_features=module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]
    leave_out = {"lm_head.weight"} if tied else set()
    source = {name: tensor for name, tensor in stored(model.state_dict()).items() if name not in leave_out}
    scheme = PRESETS[name]
    chosen = selected_layers(scheme, layers)
    assert scheme_errors(scheme, layers, chosen) == []
    apply_quantization_config(model, QuantizationConfig.model_validate(quantization_config(scheme)))
    for module in model.modules():
        compress_module(module)
    written = {name: tensor for name, tensor in stored(model.state_dict()).items() if name not in leave_out}
    assert quantized_tensors(scheme, chosen, source) == written
