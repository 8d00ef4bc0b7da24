"""Fake quantization of weights and inputs, and how gradients pass through it; pure functions of tensors.

The numbers are those of `plugins/compressed_tensors/codes.py`, which post-training quantization uses too: a scale in
the type that the checkpoint stores, codes from it, and ``w' = (code - zero_point) · scale`` in that type. What a loader
computes from the packed codes is therefore w' to the bit.

Gradients, with ``v = w / s + z`` and ``q = round(clamp(v))``:

    straight-through (Bengio et al., arXiv 1308.3432)   dL/dw = dL/dw'   where w lies inside of the range, else 0
    learned scales (LSQ, Esser et al., arXiv 1902.08153, eq. 3; LSQ+, Bhalgat et al., arXiv 2004.09576, for z)
                                                        dw'/ds = q - z - w / s   inside,  q - z   outside
                                                        dw'/dz = 0               inside,  -s      outside
                                                        both times g = 1 / √(n · (2^(b-1) - 1)), n elements a scale

"Inside" ends half a step beyond the last codes, -2^(b-1) - ½ ≤ v ≤ 2^(b-1) - ½: up to there rounding is off by half a
step at most. A range that is the tensor's own (its least and largest number) has nothing outside,
and ternary and binary weights pass every gradient, as BitNet does.

Shapes: O output channels, I input channels, G groups of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ....ds_configs.quantization.scheme import ActivationQuantization, WeightQuantization
from ....plugins.compressed_tensors.codes import (
    activation_levels,
    activation_scale_and_zero_point,
    code_range,
    dequantize,
    dequantize_activations,
    weight_levels,
    weight_scale_and_zero_point,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

WeightRule = Literal["minmax", "learned", "ternary", "binary"]
"""Where scales come from: the weight's own range, training, or the mean magnitude with three or two values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightRounding:
    """Rounding of a matrix."""

    quantization: WeightQuantization
    """Bits, symmetry and what shares a scale."""
    rule: WeightRule
    """Where its scales come from."""
    stored_dtype: torch.dtype
    """Type of the scales in the checkpoint, and of the weight that a loader makes."""
    ranks: Any | None = None
    """Process group whose ranks hold parts of what shares a scale; `None` where this rank holds all of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundedWeight:
    """A rounded matrix in the parts that a checkpoint stores."""

    levels: Any
    """Codes [O, I] as floats."""
    scale: Any
    """[1], [O, 1] or [O, G], in the stored type."""
    zero_point: Any | None
    """int8, of the scale's shape; `None` if symmetric."""

    def value(self, rounding: WeightRounding) -> Tensor:
        """Return the weight [O, I] that a loader makes of the codes."""
        return dequantize(self.levels, self.scale, self.zero_point, rounding.quantization)


def round_weight(
    weight: Tensor, rounding: WeightRounding, scale: Tensor | None = None, zero_point: Tensor | None = None
) -> RoundedWeight:
    """Return the codes, the scales and the zero points of a matrix.

    Ternary: ``s = mean |w|``, ``q = round(clamp(w / s, -1, 1))`` (BitNet b1.58, Ma et al., arXiv 2402.17764, eq. 1-3).
    Binary: the same scale and ``q = 1 where w ≥ 0, else -1`` (XNOR-Net, Rastegari et al., arXiv 1603.05279, eq. 6).

    Args:
        weight: [O, I].
        rounding: How.
        scale: Learned scale, any float type; of the stored scale's shape. `None` by every other rule.
        zero_point: Learned zero point before rounding, likewise; `None` if symmetric.
    """
    quantization = rounding.quantization
    if rounding.rule == "learned":
        assert scale is not None, "a learned scale is a parameter"
        return _by_learned_scale(weight, rounding, scale, zero_point)
    if rounding.rule in ("ternary", "binary"):
        return _by_mean_magnitude(weight, rounding)
    seen = weight if rounding.ranks is None else _extremes_over_ranks(weight, rounding)
    own_scale, own_zero_point = weight_scale_and_zero_point(seen, quantization, rounding.stored_dtype)
    levels = weight_levels(weight, own_scale, own_zero_point, quantization)
    return RoundedWeight(levels=levels, scale=own_scale, zero_point=own_zero_point)


def weight_gradients(
    gradient: Tensor, weight: Tensor, rounding: WeightRounding, scale: Tensor | None, zero_point: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return dL/dw, dL/ds and dL/dz from dL/dw'; the last two are `None` unless they are learned.

    Args:
        gradient: dL/dw' [O, I].
        weight: [O, I], before rounding.
        rounding: How it was rounded.
        scale: As for `round_weight`.
        zero_point: Likewise.
    """
    import torch

    if rounding.rule != "learned":
        return gradient, None, None
    rounded = round_weight(weight, rounding, scale, zero_point)
    quantization = rounding.quantization
    by_scale_shape = sharing(gradient, quantization)
    gradient_S, levels_S, weight_S = (sharing(part, quantization) for part in (gradient, rounded.levels, weight))
    scale_S1 = rounded.scale.unsqueeze(-1).to(weight_S.dtype)
    zero_S1 = None if rounded.zero_point is None else rounded.zero_point.unsqueeze(-1).to(weight_S.dtype)
    ratio_S = weight_S / scale_S1
    inside_S = _inside(ratio_S if zero_S1 is None else ratio_S + zero_S1, quantization.bits)
    centred_S = levels_S if zero_S1 is None else levels_S - zero_S1
    shrink = _lsq_shrink(by_scale_shape.shape[-1], quantization.bits)
    by_scale = (gradient_S * torch.where(inside_S, centred_S - ratio_S, centred_S)).sum(-1) * shrink
    by_zero = None
    if zero_S1 is not None:
        by_zero = (gradient_S * torch.where(inside_S, torch.zeros_like(scale_S1), -scale_S1)).sum(-1) * shrink
    by_weight = (gradient_S * inside_S).reshape(weight.shape)
    return by_weight, by_scale, by_zero


def round_inputs(
    inputs: Tensor, quantization: ActivationQuantization, scale: Tensor | None, zero_point: Tensor | None
) -> Tensor:
    """Return inputs [..., I] as a layer with rounded activations sees them, in their own type.

    Args:
        inputs: What comes into the layer.
        quantization: Bits, symmetry, and whether ranges are found on the fly.
        scale: Of a static range, [1] in the stored type; `None` if dynamic.
        zero_point: int8 or float [1], likewise; `None` if symmetric.
    """
    if not inputs.numel():
        return inputs
    if quantization.dynamic:
        scale, zero_point = activation_scale_and_zero_point(inputs, quantization)
    assert scale is not None, "a static range has a scale"
    stored_zero = None if zero_point is None else stored_zero_point(zero_point, quantization.bits)
    levels = activation_levels(inputs, scale, stored_zero, quantization)
    return dequantize_activations(levels, scale, stored_zero).to(inputs.dtype)


def input_gradients(
    gradient: Tensor,
    inputs: Tensor,
    quantization: ActivationQuantization,
    scale: Tensor | None,
    zero_point: Tensor | None,
    *,
    learned: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return dL/dx, dL/ds and dL/dz from dL/dx'; the last two are for ranges that are learned.

    A dynamic range is the token's own, so that nothing lies outside.
    """
    import torch

    if quantization.dynamic:
        return gradient, None, None
    assert scale is not None, "a static range has a scale"
    ratio = inputs / scale
    stored_zero = None if zero_point is None else stored_zero_point(zero_point, quantization.bits).to(ratio.dtype)
    shifted = ratio if stored_zero is None else ratio + stored_zero
    inside = _inside(shifted, quantization.bits)
    if not learned:
        return gradient * inside, None, None
    levels = torch.round(torch.clamp(shifted, *code_range(quantization.bits)))
    centred = levels if stored_zero is None else levels - stored_zero
    shrink = _lsq_shrink(inputs.shape[-1], quantization.bits)
    by_scale = (gradient * torch.where(inside, centred - ratio, centred)).sum().reshape(1) * shrink
    by_zero = None
    if stored_zero is not None:
        by_zero = (gradient * torch.where(inside, torch.zeros_like(ratio), -scale.to(ratio.dtype))).sum().reshape(1)
        by_zero = by_zero * shrink
    return gradient * inside, by_scale, by_zero


def stored_scale(scale: Tensor, stored_dtype: torch.dtype) -> Tensor:
    """Return a scale as the checkpoint holds it: in the stored type, and at least the type's smallest normal number.

    A learned scale that training has pushed to zero or below thus stays there, and its gradient can bring it back; NaN
    stays NaN, so that an export can refuse it.
    """
    import torch

    return scale.detach().to(stored_dtype).clamp(min=torch.finfo(stored_dtype).tiny)


def stored_zero_point(zero_point: Tensor, bits: int) -> Tensor:
    """Return a zero point as the checkpoint holds it: an int8 code."""
    import torch

    return torch.round(torch.clamp(zero_point.detach(), *code_range(bits))).to(torch.int8)


def _extremes_over_ranks(weight: Tensor, rounding: WeightRounding) -> Tensor:
    """Return the least and the largest number of what shares a scale, [O, 2] by channel and [1, 2] by tensor.

    They have the scale of the whole matrix, to the bit.
    """
    import torch

    assert rounding.rule == "minmax" and rounding.quantization.strategy != "group", "checked when layers were divided"
    shared = sharing(weight.detach(), rounding.quantization)
    ends = torch.stack([-shared.amin(-1), shared.amax(-1)])
    torch.distributed.all_reduce(ends, op=torch.distributed.ReduceOp.MAX, group=rounding.ranks)
    return torch.stack([-ends[0], ends[1]], dim=-1).reshape(-1, 2)


def _by_learned_scale(
    weight: Tensor, rounding: WeightRounding, scale: Tensor, zero_point: Tensor | None
) -> RoundedWeight:
    quantization = rounding.quantization
    kept = stored_scale(scale, rounding.stored_dtype)
    stored_zero = None if zero_point is None else stored_zero_point(zero_point, quantization.bits)
    levels = weight_levels(weight, kept, stored_zero, quantization)
    return RoundedWeight(levels=levels, scale=kept, zero_point=stored_zero)


def _by_mean_magnitude(weight: Tensor, rounding: WeightRounding) -> RoundedWeight:
    import torch

    quantization = rounding.quantization
    shared = sharing(weight, quantization)
    kept = stored_scale(shared.abs().mean(-1), rounding.stored_dtype)
    if rounding.rule == "binary":
        levels = torch.where(shared >= 0, 1.0, -1.0).to(weight.dtype)
    else:
        levels = torch.round(torch.clamp(shared / kept.unsqueeze(-1), -1, 1))
    return RoundedWeight(levels=levels.reshape(weight.shape), scale=kept, zero_point=None)


def sharing(matrix: Tensor, quantization: WeightQuantization) -> Tensor:
    """Return a view whose last dimension holds what shares one scale; before it, the scale's own shape."""
    if quantization.strategy == "tensor":
        return matrix.reshape(1, -1)
    size = matrix.shape[-1] if quantization.strategy == "channel" else quantization.group_size
    assert size is not None, "groups have a size"
    return matrix.unflatten(-1, (-1, size))


def _inside(scaled: Tensor, bits: int) -> Tensor:
    least, largest = code_range(bits)
    return (scaled >= least - 0.5) & (scaled <= largest + 0.5)


def _lsq_shrink(elements: int, bits: int) -> float:
    return float((elements * max(code_range(bits)[1], 1)) ** -0.5)
