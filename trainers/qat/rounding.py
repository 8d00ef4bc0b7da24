"""Fake quantization of weights and inputs with its gradients, as pure functions of tensors.

The arithmetic is that of `plugins/compressed_tensors.py`, which post-training quantization uses too: a scale in
the dtype that the checkpoint stores, codes from it, and ``w' = (code - zero_point) · scale`` in that dtype. A loader
therefore computes w' bit for bit from the packed codes.

Gradients, with ``v = w / s + z`` and ``q = round(clamp(v))``:

    straight-through (Bengio et al., arXiv 1308.3432)   dL/dw = dL/dw'   where w is inside the range, else 0
    learned scales (LSQ, Esser et al., arXiv 1902.08153, eq. 3; LSQ+, Bhalgat et al., arXiv 2004.09576, for z)
                                                        dw'/ds = q - z - w / s   inside,  q - z   outside
                                                        dw'/dz = 0               inside,  -s      outside
                                                        both times g = 1 / √(n · (2^(b-1) - 1)), n elements per scale

"Inside" means -2^(b-1) - ½ ≤ v ≤ 2^(b-1) - ½, where the rounding error is at most half a step. Nothing is outside a
range that is the tensor's own minimum and maximum. Ternary and binary weights pass every gradient, as in BitNet.

Shapes: O output channels, I input channels, G groups of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ...ds_configs.quantization.scheme import ActivationQuantization, WeightQuantization
from ...plugins.compressed_tensors import (
    RoundedWeight,
    activation_scale_and_zero_point,
    code_range,
    levels_of,
    sharing,
    values_of,
    weight_levels,
    weight_scale_and_zero_point,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

WeightRule = Literal["minmax", "learned", "ternary", "binary"]
"""Source of the scales: the weight's own range, training, or the mean magnitude (three or two values)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounding:
    """How to round one linear layer at one step."""

    quantization: WeightQuantization
    rule: WeightRule
    stored_dtype: torch.dtype
    """Dtype of the scales in the checkpoint, and of the weight that a loader computes."""
    inputs: ActivationQuantization | None = None
    """Number format of the inputs; `None`: full precision."""


def round_weight(
    weight: Tensor, rounding: Rounding, scale: Tensor | None = None, zero_point: Tensor | None = None
) -> RoundedWeight:
    """Round a matrix to codes, as floats, with scales and zero points.

    Ternary: ``s = mean |w|``, ``q = round(clamp(w / s, -1, 1))`` (BitNet b1.58, Ma et al., arXiv 2402.17764, eq. 1-3).
    Binary: the same scale and ``q = 1 where w ≥ 0, else -1`` (XNOR-Net, Rastegari et al., arXiv 1603.05279, eq. 6).

    Args:
        scale: Learned scale, any float dtype, with the stored scale's shape; `None` for every other rule.
        zero_point: Learned zero point before rounding, with the same shape; `None` if symmetric.
    """
    import torch

    quantization = rounding.quantization
    if rounding.rule in ("ternary", "binary"):
        shared = sharing(weight, quantization)
        mean_scale = stored_scale(shared.abs().mean(-1), rounding.stored_dtype)
        if rounding.rule == "binary":
            levels = torch.where(shared >= 0, 1.0, -1.0).to(weight.dtype)
        else:
            levels = torch.round(torch.clamp(shared / mean_scale.unsqueeze(-1), -1, 1))
        return RoundedWeight(codes=levels.reshape(weight.shape), scale=mean_scale, zero_point=None)
    if rounding.rule == "learned":
        assert scale is not None, "a learned scale is a parameter"
        rounded_scale = stored_scale(scale, rounding.stored_dtype)
        rounded_zero = None
        if zero_point is not None:
            limited = torch.clamp(zero_point.detach(), *code_range(quantization.bits))
            rounded_zero = torch.round(limited).to(torch.int8)
    else:
        rounded_scale, rounded_zero = weight_scale_and_zero_point(weight, quantization, rounding.stored_dtype)
    levels = weight_levels(weight, rounded_scale, rounded_zero, quantization)
    return RoundedWeight(codes=levels, scale=rounded_scale, zero_point=rounded_zero)


def weight_gradients(
    gradient: Tensor, weight: Tensor, rounding: Rounding, scale: Tensor | None, zero_point: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return dL/dw, dL/ds and dL/dz from dL/dw' [O, I]; the last two are `None` unless they are learned."""
    import torch

    if rounding.rule != "learned":
        return gradient, None, None
    rounded = round_weight(weight, rounding, scale, zero_point)
    quantization = rounding.quantization
    gradient_S, levels_S, weight_S = (sharing(part, quantization) for part in (gradient, rounded.codes, weight))
    scale_S1 = rounded.scale.unsqueeze(-1).to(weight_S.dtype)
    zero_S1 = None if rounded.zero_point is None else rounded.zero_point.unsqueeze(-1).to(weight_S.dtype)
    ratio_S = weight_S / scale_S1
    inside_S = _inside(ratio_S if zero_S1 is None else ratio_S + zero_S1, quantization.bits)
    centred_S = levels_S if zero_S1 is None else levels_S - zero_S1
    shrink = float((gradient_S.shape[-1] * max(code_range(quantization.bits)[1], 1)) ** -0.5)
    by_scale = (gradient_S * torch.where(inside_S, centred_S - ratio_S, centred_S)).sum(-1) * shrink
    by_zero = None
    if zero_S1 is not None:
        by_zero = (gradient_S * torch.where(inside_S, torch.zeros_like(scale_S1), -scale_S1)).sum(-1) * shrink
    by_weight = (gradient_S * inside_S).reshape(weight.shape)
    return by_weight, by_scale, by_zero


def round_inputs(
    inputs: Tensor, quantization: ActivationQuantization, scale: Tensor | None, zero_point: Tensor | None
) -> Tensor:
    """Round the inputs [..., I] of a layer; the result keeps their dtype.

    Args:
        scale: Scale of a static range, [1] in the stored dtype; `None` if dynamic.
        zero_point: Zero point of a static range, int8 [1]; `None` if symmetric or dynamic.
    """
    if not inputs.numel():
        return inputs
    if quantization.dynamic:
        scale, zero_point = activation_scale_and_zero_point(inputs, quantization)
    assert scale is not None, "a static range has a scale"
    levels = levels_of(inputs, scale, zero_point, quantization.bits)
    return values_of(levels, scale, zero_point).to(inputs.dtype)


def input_gradient(
    gradient: Tensor,
    inputs: Tensor,
    quantization: ActivationQuantization,
    scale: Tensor | None,
    zero_point: Tensor | None,
) -> Tensor:
    """Return dL/dx from dL/dx'; a dynamic range covers its whole token, so nothing is outside."""
    if quantization.dynamic:
        return gradient
    assert scale is not None, "a static range has a scale"
    ratio = inputs / scale
    return gradient * _inside(ratio if zero_point is None else ratio + zero_point.to(ratio.dtype), quantization.bits)


def stored_scale(scale: Tensor, stored_dtype: torch.dtype) -> Tensor:
    """Return a scale as the checkpoint stores it: in the stored dtype, at least the dtype's smallest normal number.

    A learned scale that training pushed to zero or below can therefore recover by its gradient. NaN stays NaN, so
    that the export rejects it.
    """
    import torch

    return scale.detach().to(stored_dtype).clamp(min=torch.finfo(stored_dtype).tiny)


def _inside(scaled: Tensor, bits: int) -> Tensor:
    least, largest = code_range(bits)
    return (scaled >= least - 0.5) & (scaled <= largest + 0.5)
