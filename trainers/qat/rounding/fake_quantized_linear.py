"""A linear layer that computes with rounded weights and inputs and keeps no rounded copy of either.

Autograd would save the rounded weight of every layer until the backward pass: under ZeRO-3 and FSDP2 a dense copy of
the whole model on every rank. Here only what exists anyway is saved, the parameter and the layer's input, and both are
rounded once more when gradients are due.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ....ds_configs.quantization.scheme import ActivationQuantization
from .rounding import WeightRounding, input_gradients, round_inputs, round_weight, stored_scale, weight_gradients

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearRounding:
    """Rounding of one linear layer at one step."""

    weight: WeightRounding
    """Its matrix."""
    inputs: ActivationQuantization | None = None
    """What comes into it; `None` leaves that in full precision."""
    adapter_scaling: float = 0.0
    """Factor of the low-rank product B·A that is added to the weight before it is rounded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearTensors:
    """Tensors that a rounded linear layer computes with."""

    weight: Any
    """[O, I], before rounding."""
    bias: Any | None = None
    """[O]."""
    weight_scale: Any | None = None
    """Learned scale; `None` by other rules."""
    weight_zero_point: Any | None = None
    """Learned zero point; `None` if symmetric or by other rules."""
    input_scale: Any | None = None
    """[1] of a static range, which may be learned; `None` otherwise."""
    input_zero_point: Any | None = None
    """[1] likewise."""
    adapter_a: Any | None = None
    """LoRA's A [rank, I]."""
    adapter_b: Any | None = None
    """LoRA's B [O, rank]."""


def fake_quantized_linear(inputs: Tensor, tensors: LinearTensors, rounding: LinearRounding) -> Tensor:
    """Return ``round(x) · round(W + scaling · B A)ᵀ + bias`` [..., O], with straight-through gradients.

    It computes in the type that autocast asks for, or else in that of the inputs, as a plain layer does.

    Args:
        inputs: [..., I].
        tensors: Weight and everything that belongs to it.
        rounding: How both are rounded.
    """
    device = inputs.device.type
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    if autocast:
        inputs = inputs.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False) if autocast else nullcontext():
        found: Tensor = _FakeQuantizedLinear.apply(
            inputs,
            tensors.weight,
            tensors.bias,
            tensors.weight_scale,
            tensors.weight_zero_point,
            tensors.input_scale,
            tensors.input_zero_point,
            tensors.adapter_a,
            tensors.adapter_b,
            rounding,
        )
    return found


def merged_weight(weight: Tensor, adapter_a: Tensor | None, adapter_b: Tensor | None, scaling: float) -> Tensor:
    """Return ``W + scaling · B A`` [O, I] in the wider type of both."""
    if adapter_a is None or adapter_b is None:
        return weight
    return weight + (adapter_b @ adapter_a) * scaling


class _FakeQuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_scale: Tensor | None,
        weight_zero_point: Tensor | None,
        input_scale: Tensor | None,
        input_zero_point: Tensor | None,
        adapter_a: Tensor | None,
        adapter_b: Tensor | None,
        rounding: LinearRounding,
    ) -> Tensor:
        ctx.rounding = rounding
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.input_dtype = inputs.dtype
        # A frozen layer passes its gradient on without having seen what came in, as a plain one does.
        static = rounding.inputs is not None and not rounding.inputs.dynamic
        kept_inputs = inputs if static or any(ctx.needs_input_grad[1:]) else None
        ctx.save_for_backward(
            kept_inputs, weight, weight_scale, weight_zero_point, input_scale, input_zero_point, adapter_a, adapter_b
        )
        merged = merged_weight(weight, adapter_a, adapter_b, rounding.adapter_scaling)
        rounded = _rounded(merged, rounding, weight_scale, weight_zero_point).to(inputs.dtype)
        seen = _seen(inputs, rounding, input_scale, input_zero_point)
        # DeepSpeed's ZeRO-3 replaces `torch.nn.functional.linear` by a function that saves its weight.
        answer: Tensor = torch.ops.aten.linear.default(seen, rounded, None if bias is None else bias.to(inputs.dtype))
        return answer

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight, weight_scale, weight_zero_point, input_scale, input_zero_point, a, b = ctx.saved_tensors
        rounding: LinearRounding = ctx.rounding
        needs = ctx.needs_input_grad
        merged = merged_weight(weight, a, b, rounding.adapter_scaling)
        by_inputs = by_input_scale = by_input_zero = None
        if needs[0] or needs[5] or needs[6]:
            rounded = _rounded(merged, rounding, weight_scale, weight_zero_point).to(gradient.dtype)
            by_inputs = gradient @ rounded
            del rounded
            if rounding.inputs is not None:
                kept = None if input_scale is None else stored_scale(input_scale, _stored_dtype(rounding))
                by_inputs, by_input_scale, by_input_zero = input_gradients(
                    by_inputs, inputs, rounding.inputs, kept, input_zero_point, learned=needs[5] or needs[6]
                )
        by_weight = by_scale = by_zero = None
        if any(needs[place] for place in (1, 3, 4, 7, 8)):
            seen = _seen(inputs, rounding, input_scale, input_zero_point)
            by_rounded = _rows(gradient).t() @ _rows(seen)
            by_weight, by_scale, by_zero = weight_gradients(
                by_rounded.to(merged.dtype), merged, rounding.weight, weight_scale, weight_zero_point
            )
        by_a, by_b = _adapter_gradients(by_weight, a, b, rounding.adapter_scaling)
        by_bias = _rows(gradient).sum(0) if needs[2] else None
        found = (by_inputs, by_weight, by_bias, by_scale, by_zero, by_input_scale, by_input_zero, by_a, by_b)
        others = (weight_scale, weight_zero_point, input_scale, input_zero_point, a, b)
        types = (
            ctx.input_dtype,
            weight.dtype,
            ctx.bias_dtype,
            *(None if like is None else like.dtype for like in others),
        )
        return (
            *(
                part.to(dtype) if part is not None and need else None
                for part, dtype, need in zip(found, types, needs, strict=False)
            ),
            None,
        )


def _rows(matrix: Tensor) -> Tensor:
    return matrix.reshape(-1, matrix.shape[-1])


def _rounded(merged: Tensor, rounding: LinearRounding, scale: Tensor | None, zero_point: Tensor | None) -> Tensor:
    return round_weight(merged, rounding.weight, scale, zero_point).value(rounding.weight)


def _seen(inputs: Tensor, rounding: LinearRounding, scale: Tensor | None, zero_point: Tensor | None) -> Tensor:
    if rounding.inputs is None:
        return inputs
    kept = None if scale is None else stored_scale(scale, _stored_dtype(rounding))
    return round_inputs(inputs, rounding.inputs, kept, zero_point)


def _stored_dtype(rounding: LinearRounding) -> torch.dtype:
    return rounding.weight.stored_dtype


def _adapter_gradients(
    by_merged: Tensor | None, a: Tensor | None, b: Tensor | None, scaling: float
) -> tuple[Tensor | None, Tensor | None]:
    if by_merged is None or a is None or b is None:
        return None, None
    wide = by_merged.to(a.dtype)
    return b.t() @ wide * scaling, wide @ a.t() * scaling
