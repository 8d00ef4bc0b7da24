"""What a rounded layer must compute, in plain tensor operations through autograd, written from the papers.

Shapes: O output channels, I input channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from shardwright.ds_configs.quantization.scheme import ActivationQuantization, WeightQuantization
from shardwright.trainers.qat.layers import LinearTensors, fake_quantized_linear
from shardwright.trainers.qat.rounding import Rounding

GROUP = 8
RELATIVE = 1e-6
"""Largest difference of a gradient's element, relative to the largest element."""
EXACT = torch.float64
STORED = ("input_scale", "input_zero_point")
"""Tensors that are not trained."""


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


def rounded_weight(tensors: dict[str, Any], rounding: Rounding) -> torch.Tensor:
    weight, how = tensors["weight"], rounding
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
    parts = (tensors["input_scale"], zero)
    scale, zero = (None if part is None else part.detach().expand_as(inputs) for part in parts)
    return rounded_by_lsq(inputs, scale, zero, bits=how.bits, elements=inputs.shape[-1])


def reference(tensors: dict[str, Any], rounding: Rounding) -> torch.Tensor:
    """The whole layer by einsum, through autograd."""
    weight, inputs = rounded_weight(tensors, rounding), rounded_inputs(tensors, rounding.inputs)
    found = torch.einsum("...i,oi->...o", inputs.double(), weight.double())
    return found if tensors["bias"] is None else found + tensors["bias"]


@dataclass(frozen=True, kw_only=True)
class Drawn:
    tensors: dict[str, Any]
    rounding: Rounding
    weigh: torch.Tensor
    """Of the shape of the output; the loss is the sum of the output times this."""

    def gradients(self, layer: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        leaves = {
            name: None if value is None else value.detach().clone().requires_grad_()
            for name, value in self.tensors.items()
        }
        output = layer(leaves, self.rounding)
        (output * self.weigh.to(output.dtype)).sum().backward()
        return output.detach(), {
            name: leaf.grad for name, leaf in leaves.items() if leaf is not None and name not in STORED
        }


def ours(tensors: dict[str, Any], rounding: Rounding) -> torch.Tensor:
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
) -> Drawn:
    """Draw a layer in fp64 whose learned ranges cut a part of the values off at both ends."""
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
        "input_zero_point": (11 * random(1)).round() if static and not activations.symmetric else None,
    }
    asked = weights_of(bits, symmetric, strategy)
    rounding = Rounding(
        quantization=asked,
        rule=rule,
        stored_dtype=EXACT,
        inputs=activations,
    )
    return Drawn(tensors=tensors, rounding=rounding, weigh=random(*batch, rows))


def assert_same(found: Any, wanted: Any) -> None:
    (output, gradients), (wanted_output, wanted_gradients) = found, wanted
    assert (output - wanted_output).abs().max() <= RELATIVE * wanted_output.abs().max()
    assert gradients.keys() == wanted_gradients.keys()
    for name, gradient in wanted_gradients.items():
        assert gradients[name].shape == gradient.shape, name
        difference = (gradients[name].double() - gradient.double()).abs().max()
        assert difference <= RELATIVE * gradient.abs().max() + 1e-12, f"{name}: {difference} of {gradient.abs().max()}"
