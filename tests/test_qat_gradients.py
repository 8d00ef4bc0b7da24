"""Gradients of rounded layers against references in fp64, written from the papers, and what autograd keeps for them.

Shapes: O output channels, I input channels, G groups, B sequences, T tokens.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from saved_tensors import saved_storages
from shardwright.ds_configs.quantization.scheme import (
    ActivationQuantization,
    QuantizationScheme,
    WeightQuantization,
    scheme_named,
)
from shardwright.trainers.qat.fake_quantized_linear import LinearRounding, LinearTensors, fake_quantized_linear
from shardwright.trainers.qat.layers import FakeQuantizedLinear, LayerQuantizer, QuantizationState
from shardwright.trainers.qat.rounding import (
    WeightRounding,
    input_gradients,
    round_inputs,
    round_weight,
    stored_scale,
    weight_gradients,
)

GROUP = 8
RELATIVE = 1e-6
"""Largest difference of a gradient's element, relative to the largest element."""
LEARNED_IN_FP32 = 5e-6
"""The same for learned scales in fp32: ``q - w/s`` loses what a code of 7 bits takes of the 24. Seen: 1.7e-6."""
EXACT = torch.float64
NAMES = (
    "inputs",
    "weight",
    "bias",
    "weight_scale",
    "weight_zero_point",
    "input_scale",
    "input_zero_point",
    "adapter_a",
    "adapter_b",
)


def weights_of(bits: int, symmetric: bool, strategy: Any) -> WeightQuantization:
    group = GROUP if strategy == "group" else None
    return WeightQuantization(bits=bits, symmetric=symmetric, strategy=strategy, group_size=group)


def straight(values: torch.Tensor, instead: torch.Tensor) -> torch.Tensor:
    """Values of `instead`, gradient of `values`."""
    return values + (instead - values).detach()


def spread(parts: torch.Tensor, weight: torch.Tensor, strategy: str) -> torch.Tensor:
    """Write one number for each scale out to one for each element of the weight [O, I]."""
    if strategy == "tensor":
        return parts.reshape(1, 1).expand_as(weight)
    return parts.repeat_interleave(weight.shape[1] // parts.shape[1], dim=1)


def gradient_scaled(values: torch.Tensor, factor: float) -> torch.Tensor:
    """`gradscale` of the LSQ paper's appendix: the values, with their gradient times a factor."""
    return straight(values * factor, values)


def rounded_by_lsq(
    values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, *, bits: int, elements: int
) -> torch.Tensor:
    """`quantize` of the LSQ paper's appendix with LSQ+'s offset; both parameters have the shape of the values.

    The clamp lets gradients pass for half a step more than the codes reach.
    """
    least, largest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    factor = 1 / math.sqrt(elements * largest)
    scale = gradient_scaled(scale, factor)
    zero = torch.zeros_like(values) if zero is None else gradient_scaled(zero, factor)
    offset = straight(zero, zero.clamp(least, largest).round())
    reached = (values / scale + offset).clamp(least - 0.5, largest + 0.5)
    return (straight(reached, reached.clamp(least, largest).round()) - offset) * scale


def rounded_by_range(low: Any, high: Any, values: torch.Tensor, bits: int, symmetric: bool) -> torch.Tensor:
    """Integers over [low, high] with 0 in it; the gradient is that of the values."""
    least, largest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    low, high = low.clamp(max=0), high.clamp(min=0)
    if symmetric:
        scale, zero = torch.maximum(-low, high) / (largest + 0.5), torch.zeros_like(low)
    else:
        scale = (high - low) / (2**bits - 1)
        zero = (least - low / scale).round().clamp(least, largest)
    codes = (values / scale + zero).round().clamp(least, largest)
    return straight(values, (codes - zero) * scale)


def rounded_weight(tensors: dict[str, Any], rounding: LinearRounding) -> torch.Tensor:
    weight, how = tensors["weight"], rounding.weight
    if tensors["adapter_a"] is not None:
        weight = weight + rounding.adapter_scaling * tensors["adapter_b"] @ tensors["adapter_a"]
    strategy, bits = how.quantization.strategy, how.quantization.bits
    columns = {"tensor": weight.numel(), "channel": weight.shape[1], "group": GROUP}[strategy]
    if how.rule == "learned":
        scale = spread(tensors["weight_scale"], weight, strategy)
        zero = tensors["weight_zero_point"]
        zero = None if zero is None else spread(zero, weight, strategy)
        return rounded_by_lsq(weight, scale, zero, bits=bits, elements=columns)
    shared = weight.detach().reshape(-1, columns)
    if how.rule == "minmax":
        low, high = shared.min(1, keepdim=True).values, shared.max(1, keepdim=True).values
        return rounded_by_range(low, high, weight.reshape(-1, columns), bits, how.quantization.symmetric).reshape(
            weight.shape
        )
    mean = shared.abs().sum(1, keepdim=True) / columns
    if how.rule == "binary":
        found = torch.where(shared < 0, -mean, mean)
    else:
        found = torch.where(shared.abs() <= mean / 2, torch.zeros_like(shared), shared.sign() * mean)
    return straight(weight, found.reshape(weight.shape))


def rounded_inputs(tensors: dict[str, Any], how: ActivationQuantization | None) -> torch.Tensor:
    inputs = tensors["inputs"]
    if how is None:
        return inputs
    if how.dynamic:
        seen = inputs.detach().reshape(-1, inputs.shape[-1]) if inputs.ndim > 2 else inputs.detach().reshape(1, -1)
        ends = [end.reshape(*inputs.shape[:-1], 1) if inputs.ndim > 2 else end for end in (seen.amin(1), seen.amax(1))]
        return rounded_by_range(*ends, inputs, how.bits, how.symmetric)
    zero = tensors["input_zero_point"]
    scale, zero = (None if part is None else part.expand_as(inputs) for part in (tensors["input_scale"], zero))
    return rounded_by_lsq(inputs, scale, zero, bits=how.bits, elements=inputs.shape[-1])


def reference(tensors: dict[str, Any], rounding: LinearRounding) -> torch.Tensor:
    """The whole layer by einsum, through autograd."""
    weight, inputs = rounded_weight(tensors, rounding), rounded_inputs(tensors, rounding.inputs)
    found = torch.einsum("...i,oi->...o", inputs.double(), weight.double())
    return found if tensors["bias"] is None else found + tensors["bias"]


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One layer with everything that it computes with."""

    tensors: dict[str, Any]
    rounding: LinearRounding
    weigh: torch.Tensor
    """Of the shape of the output; the loss is the sum of the output times this."""

    def gradients(self, layer: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        leaves = {
            name: None if value is None else value.detach().clone().requires_grad_()
            for name, value in self.tensors.items()
        }
        output = layer(leaves, self.rounding)
        (output * self.weigh.to(output.dtype)).sum().backward()
        return output.detach(), {name: leaf.grad for name, leaf in leaves.items() if leaf is not None}


def ours(tensors: dict[str, Any], rounding: LinearRounding) -> torch.Tensor:
    rest = {name: value for name, value in tensors.items() if name != "inputs"}
    return fake_quantized_linear(tensors["inputs"], LinearTensors(**rest), rounding)


def drawn(
    *,
    seed: int = 0,
    bits: int = 4,
    symmetric: bool = True,
    strategy: str = "group",
    rule: Any = "minmax",
    activations: ActivationQuantization | None = None,
    batch: tuple[int, ...] = (2, 3),
    rows: int = 5,
    groups: int = 2,
    biased: bool = False,
    rank: int = 0,
    dtype: torch.dtype = EXACT,
    stored_dtype: torch.dtype = EXACT,
) -> Drawn:
    """Draw a layer whose learned ranges cut a part of the values off at both ends."""
    draw = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw, dtype=EXACT)

    columns = groups * GROUP
    scales = {"tensor": (1,), "channel": (rows, 1), "group": (rows, groups)}[strategy]
    largest = 2 ** (bits - 1)
    learned, static = rule == "learned", activations is not None and not activations.dynamic
    tensors = {
        "inputs": random(*batch, columns),
        "weight": 0.3 * random(rows, columns) + 0.05,
        "bias": random(rows) if biased else None,
        "weight_scale": (0.3 + 0.1 * random(*scales).abs()) / largest if learned else None,
        "weight_zero_point": largest * 0.4 * random(*scales) if learned and not symmetric else None,
        "input_scale": torch.full((1,), 1.3 / 2 ** (activations.bits - 1), dtype=EXACT) if static else None,
        "input_zero_point": 11 * random(1) if static and not activations.symmetric else None,
        "adapter_a": 0.3 * random(rank, columns) if rank else None,
        "adapter_b": 0.3 * random(rows, rank) if rank else None,
    }
    asked = weights_of(bits, symmetric, strategy)
    rounding = LinearRounding(
        weight=WeightRounding(quantization=asked, rule=rule, stored_dtype=stored_dtype),
        inputs=activations,
        adapter_scaling=0.7 if rank else 0.0,
    )
    typed = {name: None if value is None else value.to(dtype) for name, value in tensors.items()}
    return Drawn(tensors=typed, rounding=rounding, weigh=random(*batch, rows))


def assert_same(found: Any, wanted: Any, *, relative: float = RELATIVE) -> None:
    (output, gradients), (wanted_output, wanted_gradients) = found, wanted
    assert (output - wanted_output).abs().max() <= relative * wanted_output.abs().max()
    assert gradients.keys() == wanted_gradients.keys()
    for name, gradient in wanted_gradients.items():
        assert gradients[name].shape == gradient.shape, name
        difference = (gradients[name].double() - gradient.double()).abs().max()
        assert difference <= relative * gradient.abs().max() + 1e-12, f"{name}: {difference} of {gradient.abs().max()}"


ACTIVATIONS = [
    None,
    ActivationQuantization(),
    ActivationQuantization(symmetric=False),
    ActivationQuantization(bits=4),
    ActivationQuantization(dynamic=False),
    ActivationQuantization(dynamic=False, symmetric=False),
]
RULES = [
    ("minmax", True),
    ("minmax", False),
    ("learned", True),
    ("learned", False),
    ("ternary", True),
    ("binary", True),
]


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    bits=st.integers(2, 8),
    rule=st.sampled_from(RULES),
    strategy=st.sampled_from(["tensor", "channel", "group"]),
    activations=st.sampled_from(ACTIVATIONS),
    batch=st.sampled_from([(3,), (1, 1), (2, 3), (2, 2, 2)]),
    rows=st.integers(1, 6),
    groups=st.integers(1, 3),
    biased=st.booleans(),
    rank=st.sampled_from([0, 0, 1, 3]),
)
def test_gradients_are_those_of_the_papers(seed, bits, rule, strategy, activations, batch, rows, groups, biased, rank):
    name, symmetric = rule
    # Upstream finds one dynamic range for each place of a third dimension, and tokens have only two before theirs.
    batch = batch[:2] if activations is not None and activations.dynamic else batch
    case = drawn(
        seed=seed,
        bits=2 if name in ("ternary", "binary") else bits,
        symmetric=symmetric,
        strategy=strategy,
        rule=name,
        activations=activations,
        batch=batch,
        rows=rows,
        groups=groups,
        biased=biased,
        rank=rank,
    )
    assert_same(case.gradients(ours), case.gradients(reference))


@pytest.mark.parametrize("strategy", ["tensor", "channel", "group"])
@pytest.mark.parametrize(("rule", "symmetric"), RULES)
def test_gradients_in_fp32_stay_within_millionths(rule, symmetric, strategy):
    """The reference finds its codes in fp32, where halves fall as they fall in the layer, and multiplies in fp64."""
    for bits in (2,) if rule in ("ternary", "binary") else range(2, 9):
        case = drawn(
            bits=bits,
            symmetric=symmetric,
            strategy=strategy,
            rule=rule,
            biased=True,
            rank=2,
            dtype=torch.float32,
            stored_dtype=torch.float32,
        )
        relative = LEARNED_IN_FP32 if rule == "learned" else RELATIVE
        assert_same(case.gradients(ours), case.gradients(reference), relative=relative)


def test_what_lies_outside_of_a_learned_range_gets_no_gradient():
    """Worked out by hand: s = 0.5, 4 bits, so that codes end at -8 and 7 and gradients at -4.25 and 3.75."""
    weight = torch.tensor([[3.5, 3.74, 3.76, 9.0, -4.24, -4.26, 0.3, -0.2]], dtype=EXACT)
    how = WeightRounding(quantization=weights_of(4, True, "group"), rule="learned", stored_dtype=EXACT)
    scale = torch.tensor([[0.5]], dtype=EXACT)
    assert round_weight(weight, how, scale).levels.tolist() == [[7, 7, 7, 7, -8, -8, 1, 0]]
    by_weight, by_scale, by_zero = weight_gradients(torch.ones_like(weight), weight, how, scale, None)
    assert by_weight.tolist() == [[1, 1, 0, 0, 1, 0, 1, 1]]
    inside = (7 - 7) + (7 - 7.48) + (-8 + 8.48) + (1 - 0.6) + (0 + 0.4)
    assert by_scale.item() == pytest.approx((inside + 7 + 7 - 8) / math.sqrt(8 * 7), rel=1e-12)
    assert by_zero is None


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_learned_scales_agree_with_finite_differences(bits, symmetric):
    """Codes stand still under small steps, so that the function is smooth: slopes of its parts that hold no rounding.

    With codes q, ``dw'/ds = q - z`` is what the function itself says; LSQ adds ``-w/s`` where w is inside, for the
    rounding that it takes for the identity.
    """
    largest = 2 ** (bits - 1) - 1
    case = drawn(seed=3, bits=bits, symmetric=symmetric, rule="learned", rows=4)
    weight, scale = case.tensors["weight"], case.tensors["weight_scale"]
    zero, how = case.tensors["weight_zero_point"], case.rounding.weight
    gradient = torch.randn(weight.shape, dtype=EXACT, generator=torch.Generator().manual_seed(1))
    _, by_scale, by_zero = weight_gradients(gradient, weight, how, scale, zero)
    step = 1e-9

    def loss(each: torch.Tensor) -> torch.Tensor:
        return (round_weight(weight, how, each, zero).value(how) * gradient).unflatten(1, (-1, GROUP)).sum(-1)

    assert torch.equal(
        round_weight(weight, how, scale + step, zero).levels, round_weight(weight, how, scale - step, zero).levels
    )
    slope = (loss(scale + step) - loss(scale - step)) / (2 * step)
    wide = scale.repeat_interleave(GROUP, 1)
    offset = 0 if zero is None else zero.clamp(-largest - 1, largest).round().repeat_interleave(GROUP, 1)
    ratio = weight / wide
    inside = ((ratio + offset) >= -largest - 1.5) & ((ratio + offset) <= largest + 0.5)
    assert 0 < inside.sum() < inside.numel()
    taken = (gradient * torch.where(inside, ratio, 0)).unflatten(1, (-1, GROUP)).sum(-1)
    assert torch.allclose(by_scale * math.sqrt(GROUP * largest), slope - taken, rtol=1e-5, atol=1e-5)
    if by_zero is not None:
        cut = (gradient * torch.where(inside, 0, -wide)).unflatten(1, (-1, GROUP)).sum(-1)
        assert torch.allclose(by_zero * math.sqrt(GROUP * largest), cut, rtol=1e-10, atol=0)


@pytest.mark.parametrize("rule", ["minmax", "learned"])
def test_inputs_and_bias_agree_with_finite_differences(rule):
    """Where inputs stay in full precision the layer is linear in them and in its bias."""
    case = drawn(rule=rule, symmetric=False, biased=True, rank=2)
    rest = {name: value for name, value in case.tensors.items() if name not in ("inputs", "bias")}

    def layer(inputs: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return fake_quantized_linear(inputs, LinearTensors(bias=bias, **rest), case.rounding)

    leaves = [case.tensors[name].clone().requires_grad_() for name in ("inputs", "bias")]
    assert torch.autograd.gradcheck(layer, leaves)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000), bits=st.integers(2, 8), symmetric=st.booleans())
def test_stored_ranges_of_inputs_have_gradients_of_their_own(seed, bits, symmetric):
    asked = ActivationQuantization(bits=bits, symmetric=symmetric, dynamic=False)
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(2, 3, 5, generator=draw, dtype=EXACT)
    gradient = torch.randn(2, 3, 5, generator=draw, dtype=EXACT)
    leaves = {"inputs": inputs.clone().requires_grad_(), "input_zero_point": None}
    leaves["input_scale"] = torch.full((1,), 1.1 / 2 ** (bits - 1), dtype=EXACT, requires_grad=True)
    if not symmetric:
        leaves["input_zero_point"] = torch.randn(1, generator=draw, dtype=EXACT).requires_grad_()
    expected = rounded_inputs(leaves, asked)
    expected.backward(gradient)
    scale, zero = (
        None if leaf is None else leaf.detach() for leaf in (leaves["input_scale"], leaves["input_zero_point"])
    )
    assert torch.allclose(round_inputs(inputs, asked, scale, zero), expected.detach(), rtol=1e-12, atol=0)
    found = input_gradients(gradient, inputs, asked, scale, zero)
    for mine, leaf in zip(found, (leaves["inputs"], leaves["input_scale"], leaves["input_zero_point"]), strict=True):
        assert (mine is None) == (leaf is None)
        if leaf is not None:
            assert mine.shape == leaf.shape and (mine - leaf.grad).abs().max() <= RELATIVE * leaf.grad.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_small_learned_scales_are_kept_as_they_are(dtype):
    """bf16's epsilon is 0.0078, more than most scales of 8 bits."""
    small = torch.tensor([3e-4, 1e-3, 0.5])
    assert torch.equal(stored_scale(small, dtype), small.to(dtype))
    least = stored_scale(torch.tensor([0.0, -1.0]), dtype)
    assert (least == torch.finfo(dtype).eps).all()
    assert stored_scale(torch.tensor([math.nan]), dtype).isnan().all()


def quantizer(scheme: QuantizationScheme, state: QuantizationState, **changes: Any) -> LayerQuantizer:
    settings = {"rule": "minmax", "stored_dtype": torch.float32} | changes
    return LayerQuantizer(name="layer", scheme=scheme, state=state, **settings)


def rounded_layers(model: torch.nn.Module, scheme: str, **changes: Any) -> QuantizationState:
    """Change the class of all linear layers but the head."""
    from dataclasses import replace

    found = scheme_named(scheme)
    if found.weights.strategy == "group":
        found = replace(found, weights=replace(found.weights, group_size=16))
    state = QuantizationState(enabled=True)
    for name, module in model.named_modules():
        if type(module) is torch.nn.Linear and name != "lm_head":
            module.__class__ = FakeQuantizedLinear
            module.quantizer = quantizer(found, state, **changes)
    return state


def two_layers(**where: Any) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 48, **where), torch.nn.SiLU(), torch.nn.Linear(48, 16, **where))


def small_model(*, layers: int = 2) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        max_position_embeddings=64,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


IDS = torch.randint(0, 128, (2, 24), generator=torch.Generator().manual_seed(0))


def step(model: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(input_ids=IDS, labels=IDS).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("scheme", ["W8A8", "W4A8", "W4A4"])
def test_the_first_layer_has_a_gradient_although_inputs_are_rounded(scheme):
    """Against the same two layers written out with the reference; upstream's own forward pass cuts it off."""
    model = two_layers().double()
    rounded_layers(model, scheme, stored_dtype=EXACT)
    inputs = torch.randn(2, 5, 32, dtype=EXACT, generator=torch.Generator().manual_seed(1))
    model(inputs).square().sum().backward()
    leaves = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    how = model[0].quantizer.rounding()
    hidden, rest = inputs, dict.fromkeys(NAMES)
    for weight, bias in (leaves[:2], leaves[2:]):
        hidden = written_out(rest | {"inputs": hidden, "weight": weight, "bias": bias}, how)
        hidden = torch.nn.functional.silu(hidden) if weight.shape[0] == 48 else hidden
    hidden.square().sum().backward()
    for found, wanted in zip(model.parameters(), leaves, strict=True):
        assert found.grad is not None and wanted.grad.abs().max() > 0
        assert (found.grad - wanted.grad).abs().max() <= RELATIVE * wanted.grad.abs().max()


def written_out(tensors: dict[str, Any], how: LinearRounding) -> torch.Tensor:
    """`reference`, for groups of 16."""
    weight, columns = tensors["weight"], how.weight.quantization.group_size or tensors["weight"].shape[1]
    shared = weight.reshape(-1, columns)
    ends = shared.detach().min(1, keepdim=True).values, shared.detach().max(1, keepdim=True).values
    rounded = rounded_by_range(*ends, shared, how.weight.quantization.bits, how.weight.quantization.symmetric)
    seen = rounded_inputs(tensors, how.inputs)
    return torch.einsum("...i,oi->...o", seen, rounded.reshape(weight.shape)) + tensors["bias"]


@pytest.mark.parametrize("scheme", ["W8A8", "W4A16", "W2A16_ASYM"])
def test_every_parameter_of_a_llama_has_a_gradient(scheme):
    model = small_model()
    plain = step(model)
    rounded_layers(model, scheme)
    found = step(model)
    assert found.keys() == plain.keys()
    assert all(gradient.abs().max() > 0 for gradient in found.values())
    alike = torch.nn.functional.cosine_similarity
    first = "model.layers.0.self_attn.q_proj.weight"
    assert alike(found[first].flatten(), plain[first].flatten(), dim=0) > (0.99 if scheme == "W8A8" else 0.1)


@pytest.mark.parametrize("scheme", ["W4A16", "W8A8", "W2A16_ASYM"])
def test_no_dense_copy_is_kept(scheme):
    """What autograd saves beyond parameters and inputs is what it saves for the plain model."""
    model = small_model()
    known = [*model.parameters(), *model.buffers(), IDS]
    with saved_storages(known) as plain:
        model(input_ids=IDS, labels=IDS).loss.backward()
    rounded_layers(model, scheme)
    with saved_storages(known) as rounded:
        model(input_ids=IDS, labels=IDS).loss.backward()
    # Plain layers see a flattened view of the same storages.
    assert by_elements(rounded) == by_elements(plain)
    matrices = {tuple(p.shape) for p in model.parameters() if p.ndim == 2} - {tuple(IDS.shape)}
    assert not matrices & {shape for shape, _ in rounded}


def by_elements(sizes: Counter[tuple[tuple[int, ...], torch.dtype]]) -> Counter[tuple[int, torch.dtype]]:
    found: Counter[tuple[int, torch.dtype]] = Counter()
    for (shape, dtype), count in sizes.items():
        found[math.prod(shape), dtype] += count
    return found


def test_a_layer_saves_its_input_and_its_parameters_alone():
    model = two_layers()
    rounded_layers(model, "W8A8")
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    inputs = torch.randn(2, 5, 32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model[0](inputs)
    assert {tensor.data_ptr() for tensor in saved} == {inputs.data_ptr(), model[0].weight.data_ptr()}


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
    whole = round_weight(layer.weight, rounding.weight).value(rounding.weight).sum(0).expand_as(inputs)
    seen = inputs.detach()
    inside = (seen >= -1.285) & (seen <= 1.275) if kept else torch.ones_like(seen)
    assert torch.allclose(inputs.grad, whole * inside, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(32,), (0, 32), (2, 0, 32)])
@pytest.mark.parametrize("scheme", ["W8A8", "W4A16"])
def test_single_and_no_rows_pass_as_through_a_plain_layer(scheme, shape):
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


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("scheme", ["W8A8", "W4A16"])
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
            how = model[place].quantizer.rounding().weight
            plain[place].weight.copy_(round_weight(model[place].weight, how).value(how))
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


def test_inference_mode_gives_the_same_numbers():
    model = small_model().eval()
    rounded_layers(model, "W8A8")
    with torch.inference_mode():
        found = model(input_ids=IDS).logits
    assert torch.equal(found, model(input_ids=IDS).logits.detach())


def test_a_moved_model_and_a_copy_round_as_before():
    """The copy has a state of its own; a change of type or device replaces the data of parameters alone."""
    model = small_model()
    state = rounded_layers(model, "W4A16", stored_dtype=torch.bfloat16)
    before = model(input_ids=IDS).logits.detach()
    other = copy.deepcopy(model)
    assert torch.equal(other(input_ids=IDS).logits.detach(), before)
    state.enabled = False
    plain = model(input_ids=IDS).logits.detach()
    assert not torch.equal(plain, before) and torch.equal(other(input_ids=IDS).logits.detach(), before)
    state.enabled = True
    model.to(torch.bfloat16)
    assert model(input_ids=IDS).logits.dtype == torch.bfloat16
    shapes = copy.deepcopy(model).to("meta")
    assert shapes(input_ids=IDS.to("meta")).logits.shape == before.shape
    model.to(torch.float32)
    near = torch.nn.functional.cosine_similarity(model(input_ids=IDS).logits.flatten(), before.flatten(), dim=0)
    assert near > 0.99


def test_keys_of_a_saved_model_stay_as_they_were(tmp_path):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model = small_model()
    model.save_pretrained(tmp_path / "plain")
    rounded_layers(model, "W4A16")
    step(model)
    model.save_pretrained(tmp_path / "rounded")
    plain, rounded = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "rounded"))
    assert plain.keys() == rounded.keys()
    assert all(torch.equal(plain[name], rounded[name]) for name in plain)
    configs = [(tmp_path / name / "config.json").read_text() for name in ("plain", "rounded")]
    assert configs[0] == configs[1]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "rounded")
    assert type(again.model.layers[0].mlp.up_proj) is torch.nn.Linear
