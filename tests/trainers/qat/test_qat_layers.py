"""Layers that round, inside of models: their gradients, what autograd keeps for them, and what stays as it was."""

from __future__ import annotations

import copy
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from rounding_reference import GROUP
from saved_tensors import saved_storages
from shardwright.ds_configs.quantization.scheme import QuantizationScheme, scheme_named
from shardwright.trainers.qat.attach import attach
from shardwright.trainers.qat.layers import (
    FakeQuantizedLinear,
    LayerQuantizer,
    LinearTensors,
    QuantizationState,
    fake_quantized_linear,
)
from shardwright.trainers.qat.rounding import round_weight
from shardwright.trainers.qat.settings import QATConfig
from small_models import llama


def of_groups(name: str) -> QuantizationScheme:
    """Return a preset with groups that are small enough for the models here."""
    found = scheme_named(name)
    if found.weights.strategy != "group":
        return found
    return replace(found, weights=replace(found.weights, group_size=GROUP))


def rounded_layers(model: torch.nn.Module, scheme: str, stored_dtype: torch.dtype = torch.float32) -> None:
    """Change the class of all linear layers but the head."""
    shared = {"scheme": of_groups(scheme), "state": QuantizationState(rule="minmax", enabled=True)}
    for name, module in model.named_modules():
        if type(module) is torch.nn.Linear and name != "lm_head":
            module.__class__ = FakeQuantizedLinear
            module.quantizer = LayerQuantizer(name="layer", stored_dtype=stored_dtype, **shared)


def two_layers(**where: Any) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 48, **where), torch.nn.SiLU(), torch.nn.Linear(48, 16, **where))


def small_model(*, layers: int = 2) -> Any:
    return llama(num_hidden_layers=layers, vocab_size=128, max_position_embeddings=64, attn_implementation="sdpa")


IDS = torch.randint(0, 128, (2, 24), generator=torch.Generator().manual_seed(0))


def step(model: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(input_ids=IDS, labels=IDS).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("scheme", ["W4A16", "W8A8"])
def test_no_dense_copy_is_saved_and_no_key_changes(scheme):
    """What autograd saves beyond parameters and inputs is what it saves for the plain model."""
    model = small_model()
    keys = list(model.state_dict())
    known = [*model.parameters(), *model.buffers(), IDS]
    with saved_storages(known) as plain:
        model(input_ids=IDS, labels=IDS).loss.backward()
    rounded_layers(model, scheme)
    assert list(model.state_dict()) == keys
    with saved_storages(known) as rounded:
        model(input_ids=IDS, labels=IDS).loss.backward()
    # Plain layers see a flattened view of the same storages.
    flat = [Counter((math.prod(shape), dtype) for shape, dtype in each.elements()) for each in (rounded, plain)]
    assert flat[0] == flat[1]
    matrices = {tuple(p.shape) for p in model.parameters() if p.ndim == 2} - {tuple(IDS.shape)}
    assert not matrices & {shape for shape, _ in rounded}


@pytest.mark.parametrize(("scheme", "kept"), [("W4A16", False), ("W8A8", False), ("W8A8_STATIC", True)])
def test_a_frozen_layer_keeps_its_input_only_for_the_ends_of_a_stored_range(scheme, kept):
    layer = torch.nn.Linear(32, 8).requires_grad_(False)
    rounded_layers(torch.nn.Sequential(layer), scheme)
    inputs = torch.randn(3, 5, 32).requires_grad_()
    rounding, scale = layer.quantizer.rounding(), torch.full((1,), 0.01) if kept else None
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (saved.append(tensor.data_ptr()), tensor)[1], lambda tensor: tensor
    ):
        tensors = LinearTensors(weight=layer.weight, bias=layer.bias, input_scale=scale)
        output = fake_quantized_linear(inputs, tensors, rounding)
    assert (inputs.data_ptr() in saved) == kept
    output.sum().backward()
    whole = round_weight(layer.weight, rounding).value(rounding.quantization).sum(0).expand_as(inputs)
    seen = inputs.detach()
    inside = (seen >= -1.285) & (seen <= 1.275) if kept else torch.ones_like(seen)
    assert torch.allclose(inputs.grad, whole * inside, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(32,), (0, 32), (2, 0, 32)])
@pytest.mark.parametrize("scheme", ["W8A8", "W4A16"])
def test_one_and_zero_rows_equal_a_plain_layer(scheme, shape):
    model = two_layers()
    wanted = model(torch.ones(shape))
    rounded_layers(model, scheme)
    found = model(torch.ones(shape))
    assert found.shape == wanted.shape
    found.sum().backward()
    assert model[0].weight.grad.shape == (48, 32)


def test_bf16_autocast_keeps_no_bf16_copy_of_weights():
    """A plain layer under autocast does."""
    model = two_layers()
    known = [*model.parameters()]
    inputs = torch.randn(2, 5, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16), saved_storages(known) as plain:
        model(inputs)
    rounded_layers(model, "W4A16")
    with torch.autocast("cpu", torch.bfloat16), saved_storages(known) as rounded:
        model(inputs)
    copies = {(32, 48), (48, 32), (48, 16), (16, 48)}
    assert copies & {shape for shape, dtype in plain if dtype == torch.bfloat16}
    assert not copies & {shape for shape, _ in rounded}
    assert rounded.total() < plain.total()


@pytest.mark.parametrize(("scheme", "reentrant"), [("W8A8", True), ("W4A16", False)])
def test_checkpointing_changes_no_gradient(scheme, reentrant):
    model = small_model().train()
    rounded_layers(model, scheme)
    wanted = step(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    found = step(model)
    assert all(torch.equal(found[name], gradient) for name, gradient in wanted.items())


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scheme", ["W4A16", "W2A16_ASYM"])
def test_autocast_computes_what_a_plain_layer_of_the_loaded_weight_does(scheme, stored):
    model = two_layers()
    plain = copy.deepcopy(model)
    rounded_layers(model, scheme, stored_dtype=stored)
    with torch.no_grad():
        for place in (0, 2):
            how = model[place].quantizer.rounding()
            plain[place].weight.copy_(round_weight(model[place].weight, how).value(how.quantization))
    inputs = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
    pair = [inputs.clone().requires_grad_() for _ in range(2)]
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = model(pair[0]), plain(pair[1])
    assert found.dtype == torch.bfloat16 and torch.equal(found, wanted)
    found.sum().backward()
    wanted.sum().backward()
    assert torch.equal(pair[0].grad, pair[1].grad)
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad.dtype == torch.float32 and torch.equal(mine.grad, other.grad)


FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("scheme", "rule", "base", "stored"),
    [
        ("W4A16", "minmax", FP32, "float32"),
        ("W4A16", "minmax", BF16, "bfloat16"),
        ("W4A16_ASYM", "minmax", BF16, "bfloat16"),
        ("W4A16_ASYM", "minmax", FP32, "bfloat16"),
        ("W2A16", "ternary", FP32, "bfloat16"),
        ("W2A16", "binary", BF16, "float32"),
        ("W2A16", "learned", BF16, "float32"),
        ("W4A16_ASYM", "learned", FP32, "bfloat16"),
    ],
)
def test_stored_weight_equals_weight_of_forward_pass(scheme, rule, base, stored):
    """Rows of the identity show a layer's matrix to the bit."""
    model = small_model(layers=1).to(base)
    attachment = attach(model, QATConfig(scheme=of_groups(scheme), stored_dtype=stored, weight_rule=rule))
    attachment.state.enabled = True
    model(input_ids=IDS)
    for name, module in attachment.modules.items():
        columns = module.in_features
        with torch.no_grad():
            seen = module(torch.eye(columns, dtype=base))
        (layer,) = module.stored_layers(dict(module.named_parameters())).values()
        assert layer.codes.dtype == torch.int8 and layer.scale.dtype == getattr(torch, stored)
        loaded = layer.value(attachment.scheme.weights)
        assert torch.equal(seen.t(), loaded.to(base)), name
