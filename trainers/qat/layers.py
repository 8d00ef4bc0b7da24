"""Linear layers that compute with fake-quantized weights and inputs, and the ranges of their inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...ds_configs.quantization.scheme import ActivationQuantization, QuantizationScheme
from ...ds_configs.specs.errors import ConfigError, UsageError
from ...plugins.compressed_tensors import RoundedWeight, range_scale_and_zero_point
from ...plugins.transformers.gradient_checkpointing import in_backward_pass
from .rounding import Rounding, WeightRule, input_gradient, round_inputs, round_weight, weight_gradients

if TYPE_CHECKING:
    from torch import Tensor

AVERAGING_CONSTANT = 0.01
"""Weight of the newest step in a moving average."""
Reduction = Callable[["Tensor"], "Tensor"]
"""Returns the elementwise minimum of all ranks' tensors."""


class InputRange:
    """Range of the inputs of one matrix, with the scale and zero point that the checkpoint stores.

    A plain object, not part of any state dict. Both bounds are one tensor (low, -high), fp32 [2], so that one minimum
    updates both; the scale is rounded to the stored dtype before it is used. A moving average combines the minimum and
    maximum of each step.
    """

    def __init__(self, quantization: ActivationQuantization, *, stored_dtype: torch.dtype, name: str = "") -> None:
        self.quantization = quantization
        self.stored_dtype = stored_dtype
        self.name = name
        self._ends: Tensor | None = None
        self._stored: tuple[Tensor, Tensor | None] | None = None
        self.open_step: Tensor | None = None
        """Bounds of the values that this rank saw in the current step."""

    @property
    def scale(self) -> Tensor | None:
        """[1] in the stored dtype; `None` before any values. Each update of the range creates a new tensor."""
        stored = self._scale_and_zero_point()
        return None if stored is None else stored[0]

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Low and high; `None` before all ranks have agreed on them."""
        return None if self._ends is None else (float(self._ends[0]), -float(self._ends[1]))

    def on(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Move scale and zero point to a device and return them.

        Raises:
            UsageError: the range has no values yet.
        """
        stored = self._scale_and_zero_point()
        if stored is None:
            where = f"input range of {self.name or 'a layer'}"
            rule = "has no values, and the layer rounds its inputs"
            fix = "train before you evaluate: forward passes in training mode observe ranges"
            raise UsageError(ConfigError(where=where, rule=rule, fix=fix))
        scale, zero_point = stored
        if scale.device != device:
            # Autograd cannot save tensors that were created in inference mode.
            with torch.inference_mode(False):
                stored = self._stored = scale.to(device), None if zero_point is None else zero_point.to(device)
        return stored

    def observe(self, inputs: Tensor) -> None:
        """Observe the inputs of a forward pass, without synchronization with the accelerator.

        The repeated pass of gradient checkpointing is ignored.
        """
        if inputs.numel() == 0 or in_backward_pass():
            return
        device, inputs = inputs.device.type, inputs.detach()
        if torch.is_autocast_enabled(device):
            inputs = inputs.to(torch.get_autocast_dtype(device))
        low, high = torch.aminmax(inputs)
        ends = torch.stack([low, -high]).float()
        # fp16 gradient scaling produces infinities and skips the step: such a batch must not move ranges.
        ends = torch.where(torch.isfinite(ends).all(), ends, torch.full_like(ends, math.inf))
        self.open_step = ends if self.open_step is None else torch.minimum(self.open_step, ends)

    def set_bounds(self, low: float, high: float) -> None:
        """Set the range, extended to contain 0."""
        _set_ends([self], torch.tensor([[low, -high]], dtype=torch.float32))

    def _scale_and_zero_point(self) -> tuple[Tensor, Tensor | None] | None:
        # Before the first step is closed, a rounding layer uses the range of the values that this rank saw.
        if self._stored is None and self.open_step is not None:
            self._stored = _scales_and_zero_points([self], self.open_step.unsqueeze(0).clamp(max=0))
        return self._stored


def _scales_and_zero_points(ranges: Sequence[InputRange], ends_N2: Tensor) -> tuple[Tensor, Tensor | None]:
    return range_scale_and_zero_point(
        ends_N2[:, 0],
        -ends_N2[:, 1],
        bits=ranges[0].quantization.bits,
        symmetric=ranges[0].quantization.symmetric,
        stored_dtype=ranges[0].stored_dtype,
    )


def _set_ends(ranges: Sequence[InputRange], ends_N2: Tensor) -> None:
    """Set the bounds of ranges, which have the same number format."""
    with torch.inference_mode(False), torch.no_grad():
        ends_N2 = ends_N2.clamp(max=0)
        scale_N, zero_point_N = _scales_and_zero_points(ranges, ends_N2)
        for index, input_range in enumerate(ranges):
            own = slice(index, index + 1)
            input_range._ends = ends_N2[index]
            input_range._stored = scale_N[own], None if zero_point_N is None else zero_point_N[own]


def synchronise(ranges: Iterable[InputRange], *, reduction: Reduction | None = None) -> None:
    """Close an optimizer step: combine the values of all ranks and update observed ranges.

    Every rank must call it with the same layers in the same order, also after steps that overflowed. The number of
    collectives does not depend on the number of layers.
    """
    observed = list(ranges)
    if not observed:
        return
    reduction = reduction or _reduce_over_ranks
    rows = [torch.full((2,), math.inf) if each.open_step is None else each.open_step for each in observed]
    device = next((row.device for row in rows if row.device.type != "cpu"), rows[0].device)
    ends_N2 = reduction(torch.stack([row.to(device) for row in rows])).to(device)
    has_values = torch.isfinite(ends_N2[:, 0]).tolist()
    for input_range in observed:
        input_range.open_step = None
    if not any(has_values):
        return
    # All ranges of a model have one number format: separately they would take a dozen tiny kernels each.
    changed = [input_range for input_range, any_values in zip(observed, has_values, strict=True) if any_values]
    new_N2 = ends_N2[torch.tensor(has_values, device=device)]
    before = [each._ends if each._ends is not None else new for each, new in zip(changed, new_N2, strict=True)]
    old_N2 = torch.stack([ends.to(device) for ends in before])
    _set_ends(changed, old_N2 + AVERAGING_CONSTANT * (new_N2 - old_N2))


def _reduce_over_ranks(tensor: Tensor) -> Tensor:
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return tensor
    device = tensor.device
    if device.type == "cpu" and "gloo" not in dist.get_backend():
        device = torch.device(torch.accelerator.current_accelerator() or "cpu")
    reduced = tensor.to(device, copy=True)
    dist.all_reduce(reduced, op=dist.ReduceOp.MIN)
    return reduced


@dataclass(kw_only=True, slots=True)
class QuantizationState:
    """Progress of quantization-aware training, shared by all layers of a model."""

    rule: WeightRule
    """Source of the scales."""
    enabled: bool = False
    """Whether forward passes round."""
    observing: bool = False
    """Whether forward passes in training update activation ranges."""
    trained_steps: int = 0
    """Optimizer steps with rounding."""


class LinearTensors(NamedTuple):
    """Tensors that a rounded linear layer computes with."""

    weight: Tensor
    """[O, I], before rounding."""
    bias: Tensor | None = None
    """[O]."""
    weight_scale: Tensor | None = None
    """Learned scale; `None` for other rules."""
    weight_zero_point: Tensor | None = None
    """Learned zero point; `None` if symmetric or for other rules."""
    input_scale: Tensor | None = None
    """[1], stored scale of a static range; `None` if dynamic."""
    input_zero_point: Tensor | None = None
    """int8 [1], stored zero point; `None` if symmetric or dynamic."""


def fake_quantized_linear(inputs: Tensor, tensors: LinearTensors, rounding: Rounding) -> Tensor:
    """Return ``round(x) · round(W)ᵀ + bias`` [..., O], with straight-through gradients.

    Like a plain layer, it computes in the autocast dtype, or in the dtype of the inputs [..., I] without autocast.
    """
    device = inputs.device.type
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    if autocast:
        inputs = inputs.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False) if autocast else nullcontext():
        output: Tensor = _FakeQuantizedLinear.apply(inputs, *tensors, rounding)
    return output


class _FakeQuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, *operands: Any) -> Tensor:
        tensors, rounding = LinearTensors(*operands[:-1]), operands[-1]
        ctx.rounding = rounding
        ctx.dtypes = [None if operand is None else operand.dtype for operand in (inputs, *tensors)]
        # Like a plain layer, a frozen layer does not need its inputs in the backward pass.
        static = rounding.inputs is not None and not rounding.inputs.dynamic
        saved_inputs = inputs if static or any(ctx.needs_input_grad[1:]) else None
        ctx.save_for_backward(saved_inputs, *tensors._replace(bias=None))
        rounded = _rounded(tensors, rounding).to(inputs.dtype)
        seen, bias = _seen(inputs, tensors, rounding), tensors.bias
        # DeepSpeed's ZeRO-3 replaces `torch.nn.functional.linear` with a function that saves its weight.
        output: Tensor = torch.ops.aten.linear.default(seen, rounded, None if bias is None else bias.to(inputs.dtype))
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, *saved = ctx.saved_tensors
        tensors, rounding = LinearTensors(*saved), ctx.rounding
        needs = ctx.needs_input_grad
        by_inputs = None
        if needs[0]:
            rounded = _rounded(tensors, rounding).to(gradient.dtype)
            by_inputs = gradient @ rounded
            del rounded
            if rounding.inputs is not None:
                by_inputs = input_gradient(
                    by_inputs, inputs, rounding.inputs, tensors.input_scale, tensors.input_zero_point
                )
        by_weight = by_scale = by_zero = None
        if any(needs[index] for index in (1, 3, 4)):
            by_rounded = _rows(gradient).t() @ _rows(_seen(inputs, tensors, rounding))
            by_weight, by_scale, by_zero = weight_gradients(
                by_rounded.to(tensors.weight.dtype),
                tensors.weight,
                rounding,
                tensors.weight_scale,
                tensors.weight_zero_point,
            )
        by_bias = _rows(gradient).sum(0) if needs[2] else None
        gradients = (by_inputs, by_weight, by_bias, by_scale, by_zero, None, None)
        return (
            *(
                part.to(dtype) if part is not None and need else None
                for part, dtype, need in zip(gradients, ctx.dtypes, needs, strict=False)
            ),
            None,
        )


def _rows(matrix: Tensor) -> Tensor:
    return matrix.reshape(-1, matrix.shape[-1])


def _rounded(tensors: LinearTensors, rounding: Rounding) -> Tensor:
    rounded = round_weight(tensors.weight, rounding, tensors.weight_scale, tensors.weight_zero_point)
    return rounded.value(rounding.quantization)


def _seen(inputs: Tensor, tensors: LinearTensors, rounding: Rounding) -> Tensor:
    if rounding.inputs is None:
        return inputs
    return round_inputs(inputs, rounding.inputs, tensors.input_scale, tensors.input_zero_point)


WEIGHT_SCALE, WEIGHT_ZERO_POINT = "learned_weight_scale", "learned_weight_zero_point"
LEARNED = (WEIGHT_SCALE, WEIGHT_ZERO_POINT)
"""Names of the parameters for learned scales and zero points of a layer."""


@dataclass(kw_only=True)
class LayerQuantizer:
    """Rounding of one matrix: a plain attribute of its module, which adds no key to the state dict."""

    name: str
    """Name of the layer in the checkpoint."""
    scheme: QuantizationScheme
    """Quantization scheme of the checkpoint."""
    stored_dtype: torch.dtype
    """Dtype of scales in the checkpoint."""
    state: QuantizationState
    """Shared by all layers of the model."""
    input_range: InputRange | None = None
    """Stored range of the inputs; `None` if the scheme has none."""
    forward_dtype: torch.dtype | None = None
    """Dtype of the weight in the last forward pass, which an FSDP2 policy casts from the dtype of the parameter."""

    def rounding(self) -> Rounding:
        """Return the rounding of a forward pass."""
        return Rounding(
            quantization=self.scheme.weights,
            rule=self.state.rule,
            stored_dtype=self.stored_dtype,
            inputs=self.scheme.activations,
        )

    def observe(self, inputs: Tensor, *, training: bool) -> None:
        """Update the input range, if ranges are being observed."""
        if self.input_range is not None and self.state.observing and training:
            self.input_range.observe(inputs)

    def linear(
        self,
        module: torch.nn.Module,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        """Return the outputs of a layer, rounded with the learned scales of its module and the stored input range.

        Raises:
            UsageError: the range has no values yet.
        """
        self.forward_dtype = weight.dtype
        learned = [getattr(module, name, None) for name in LEARNED]
        stored = (None, None) if self.input_range is None else self.input_range.on(inputs.device)
        tensors = LinearTensors(weight, bias, *learned, *stored)
        return fake_quantized_linear(inputs, tensors, self.rounding())

    def stored_layer(self, weight: Tensor, parameters: Mapping[str, Tensor]) -> RoundedWeight:
        """Return the stored form of a matrix [O, I] in the dtype of the forward pass, with learned scales if any."""
        rounded = round_weight(weight, self.rounding(), *(parameters.get(name) for name in LEARNED))
        stored = (None, None) if self.input_range is None else self.input_range.on(weight.device)
        return replace(rounded, codes=rounded.codes.to(torch.int8), input_scale=stored[0], input_zero_point=stored[1])


class FakeQuantizedLinear(torch.nn.Linear):
    """Linear layer whose forward pass computes with the numbers of the checkpoint."""

    quantizer: LayerQuantizer

    @property
    def quantizers(self) -> dict[str, LayerQuantizer]:
        """The quantizer of the only matrix, by its relative name."""
        return {"": self.quantizer}

    @property
    def consumed(self) -> tuple[str, ...]:
        """Parameters that the packed form replaces."""
        return ("weight", *(name for name in LEARNED if name in self._parameters))

    def forward(self, input: Tensor) -> Tensor:
        """Return ``round(x) · round(W)ᵀ + bias`` [..., O]; without rounding before `start_step`."""
        self.quantizer.observe(input, training=self.training)
        if not self.quantizer.state.enabled:
            return super().forward(input)
        return self.quantizer.linear(self, input, self.weight, self.bias)

    def stored_layers(self, parameters: Mapping[str, Tensor]) -> dict[str, RoundedWeight]:
        """Return the stored form of the matrix, given the full parameters of this module."""
        return {"": self.quantizer.stored_layer(self.forward_weight(parameters), parameters)}

    def forward_weight(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return the matrix [O, I] of a forward pass before rounding, which an FSDP2 policy may cast."""
        weight, dtype = parameters["weight"], self.quantizer.forward_dtype
        return weight if dtype is None else weight.to(dtype)


def some_names(names: Sequence[str]) -> str:
    """Return the first names of a list, and the number of others."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
