"""Linear layers that compute with fake-quantized weights and inputs: plain, grouped (experts) and LoRA."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ....ds_configs.quantization.scheme import ActivationQuantization, QuantizationScheme
from ....ds_configs.specs.errors import ConfigError
from ....plugins.compressed_tensors.codes import StoredLayer
from .rounding import (
    WeightRounding,
    WeightRule,
    input_gradient,
    round_inputs,
    round_weight,
    weight_gradients,
)

if TYPE_CHECKING:
    from torch import Tensor

    from .observers import InputRange


@dataclass(kw_only=True, slots=True)
class QuantizationState:
    """Progress of quantization-aware training, shared by all layers of a model."""

    enabled: bool = False
    """Whether forward passes round."""
    observing: bool = False
    """Whether forward passes in training update activation ranges."""
    trained_steps: int = 0
    """Optimizer steps with rounding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearRounding:
    """How to round one linear layer at one step."""

    weight: WeightRounding
    inputs: ActivationQuantization | None = None
    """Number format of the inputs; `None`: full precision."""
    adapter_scaling: float = 0.0
    """Factor of the LoRA product B·A, which is added to the weight before rounding."""


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
    adapter_a: Tensor | None = None
    """LoRA's A [rank, I]."""
    adapter_b: Tensor | None = None
    """LoRA's B [O, rank]."""


def fake_quantized_linear(inputs: Tensor, tensors: LinearTensors, rounding: LinearRounding) -> Tensor:
    """Return ``round(x) · round(W + scaling · B A)ᵀ + bias`` [..., O], with straight-through gradients.

    Like a plain layer, it computes in the autocast dtype, or in the dtype of the inputs [..., I] without autocast.
    """
    device = inputs.device.type
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    if autocast:
        inputs = inputs.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False) if autocast else nullcontext():
        output: Tensor = _FakeQuantizedLinear.apply(inputs, *tensors, rounding)
    return output


def merged_weight(weight: Tensor, adapter_a: Tensor | None, adapter_b: Tensor | None, scaling: float) -> Tensor:
    """Return ``W + scaling · B A`` [O, I] in the wider dtype of both."""
    if adapter_a is None or adapter_b is None:
        return weight
    return weight + (adapter_b @ adapter_a) * scaling


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
        rounded = _rounded(_merged(tensors, rounding), tensors, rounding).to(inputs.dtype)
        seen, bias = _seen(inputs, tensors, rounding), tensors.bias
        # DeepSpeed's ZeRO-3 replaces `torch.nn.functional.linear` with a function that saves its weight.
        output: Tensor = torch.ops.aten.linear.default(seen, rounded, None if bias is None else bias.to(inputs.dtype))
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, *saved = ctx.saved_tensors
        tensors, rounding = LinearTensors(*saved), ctx.rounding
        needs, a, b = ctx.needs_input_grad, tensors.adapter_a, tensors.adapter_b
        merged = _merged(tensors, rounding)
        by_inputs = None
        if needs[0]:
            rounded = _rounded(merged, tensors, rounding).to(gradient.dtype)
            by_inputs = gradient @ rounded
            del rounded
            if rounding.inputs is not None:
                by_inputs = input_gradient(
                    by_inputs, inputs, rounding.inputs, tensors.input_scale, tensors.input_zero_point
                )
        by_weight = by_scale = by_zero = None
        if any(needs[index] for index in (1, 3, 4, 7, 8)):
            by_rounded = _rows(gradient).t() @ _rows(_seen(inputs, tensors, rounding))
            by_weight, by_scale, by_zero = weight_gradients(
                by_rounded.to(merged.dtype), merged, rounding.weight, tensors.weight_scale, tensors.weight_zero_point
            )
        by_a = by_b = None
        if by_weight is not None and a is not None and b is not None:
            wide = by_weight.to(a.dtype)
            by_a, by_b = b.t() @ wide * rounding.adapter_scaling, wide @ a.t() * rounding.adapter_scaling
        by_bias = _rows(gradient).sum(0) if needs[2] else None
        gradients = (by_inputs, by_weight, by_bias, by_scale, by_zero, None, None, by_a, by_b)
        return (
            *(
                part.to(dtype) if part is not None and need else None
                for part, dtype, need in zip(gradients, ctx.dtypes, needs, strict=False)
            ),
            None,
        )


def _rows(matrix: Tensor) -> Tensor:
    return matrix.reshape(-1, matrix.shape[-1])


def _merged(tensors: LinearTensors, rounding: LinearRounding) -> Tensor:
    return merged_weight(tensors.weight, tensors.adapter_a, tensors.adapter_b, rounding.adapter_scaling)


def _rounded(merged: Tensor, tensors: LinearTensors, rounding: LinearRounding) -> Tensor:
    rounded = round_weight(merged, rounding.weight, tensors.weight_scale, tensors.weight_zero_point)
    return rounded.value(rounding.weight)


def _seen(inputs: Tensor, tensors: LinearTensors, rounding: LinearRounding) -> Tensor:
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
    rule: WeightRule
    stored_dtype: torch.dtype
    """Dtype of scales in the checkpoint."""
    state: QuantizationState
    """Shared by all layers of the model."""
    input_range: InputRange | None = None
    """Stored range of the inputs; `None` if the scheme has none."""
    forward_dtype: torch.dtype | None = None
    """Dtype of the weight in the last forward pass, which an FSDP2 policy casts from the dtype of the parameter."""

    def rounding(self, *, adapter_scaling: float = 0.0) -> LinearRounding:
        """Return the rounding of a forward pass."""
        weight = WeightRounding(quantization=self.scheme.weights, rule=self.rule, stored_dtype=self.stored_dtype)
        return LinearRounding(weight=weight, inputs=self.scheme.activations, adapter_scaling=adapter_scaling)

    def stored_layer(self, weight: Tensor, parameters: Mapping[str, Tensor]) -> StoredLayer:
        """Return the stored form of a matrix [O, I] in the dtype of the forward pass, with learned scales if any."""
        rounding = self.rounding()
        rounded = round_weight(weight, rounding.weight, parameters.get(WEIGHT_SCALE), parameters.get(WEIGHT_ZERO_POINT))
        input_scale, input_zero_point = (None, None) if self.input_range is None else self.input_range.on(weight.device)
        return StoredLayer(
            codes=rounded.levels.to(torch.int8),
            scale=rounded.scale,
            zero_point=rounded.zero_point,
            input_scale=input_scale,
            input_zero_point=input_zero_point,
        )


class FakeQuantizedLinear(torch.nn.Linear):
    """Linear layer whose forward pass computes with the numbers of the checkpoint."""

    quantizer: LayerQuantizer

    @property
    def consumed(self) -> tuple[str, ...]:
        """Parameters that the packed form replaces."""
        return ("weight", *(name for name in LEARNED if name in self._parameters))

    def forward(self, input: Tensor) -> Tensor:
        """Return ``round(x) · round(W)ᵀ + bias`` [..., O]; without rounding before `start_step`."""
        quantizer = self.quantizer
        observe_inputs(quantizer, input, training=self.training)
        if not quantizer.state.enabled:
            return super().forward(input)
        quantizer.forward_dtype = self.weight.dtype
        tensors = LinearTensors(weight=self.weight, bias=self.bias, **rounding_tensors(self, quantizer, input.device))
        return fake_quantized_linear(input, tensors, quantizer.rounding())

    def stored_layers(self, parameters: Mapping[str, Tensor]) -> dict[str, StoredLayer]:
        """Return the stored form of the matrix, given the full parameters of this module."""
        return {"": self.quantizer.stored_layer(forward_weight(self, parameters), parameters)}


def observe_inputs(quantizer: LayerQuantizer, inputs: Tensor, *, training: bool) -> None:
    """Update the input range of a layer, if ranges are being observed."""
    if quantizer.input_range is not None and quantizer.state.observing and training:
        quantizer.input_range.observe(inputs)


def rounding_tensors(
    module: torch.nn.Module, quantizer: LayerQuantizer, device: torch.device
) -> dict[str, Tensor | None]:
    """Return scales and zero points for a forward pass: learned ones of the weight, stored ones of the inputs.

    Raises:
        UsageError: the range has no values yet.
    """
    input_range = quantizer.input_range
    input_scale, input_zero_point = (None, None) if input_range is None else input_range.on(device)
    return {
        "weight_scale": getattr(module, WEIGHT_SCALE, None),
        "weight_zero_point": getattr(module, WEIGHT_ZERO_POINT, None),
        "input_scale": input_scale,
        "input_zero_point": input_zero_point,
    }


def forward_weight(module: Any, parameters: Mapping[str, Tensor]) -> Tensor:
    """Return the matrix [O, I] of a linear layer in a forward pass before rounding, adapter included."""
    dtype = getattr(getattr(module, "quantizer", None), "forward_dtype", None)
    parts = [parameters[name] for name in (("weight",) if "weight" in parameters else lora_matrices(module))]
    if dtype is not None and parts[0].dtype != dtype:
        # A mixed-precision policy that casts the weight casts the adapter too.
        parts = [part.to(dtype) for part in parts]
    if len(parts) == 1:
        return parts[0]
    weight, adapter_a, adapter_b = parts
    return merged_weight(weight, adapter_a, adapter_b, module.scaling[module.active_adapters[0]])


def grouped_fake_quantized_linear(
    rows: Tensor, ends: Sequence[int], weight: Tensor, rounding: WeightRounding, *, matrices: int = 1
) -> Tensor:
    """Return ``x_e · round(W_e)ᵀ`` [T, O] for the rows of every expert e, with straight-through gradients.

    The gradient of the parameter is ``dL/dW_e = dL/dy_eᵀ · x_e``, and zero for experts without rows. Like a plain
    layer, it computes in the autocast dtype, or in the dtype of the rows without autocast.

    Args:
        rows: [T, I], sorted by expert.
        ends: Index after the last row of each expert.
        weight: [E, O, I], before rounding.
        rounding: How to round each matrix.
        matrices: Matrices of the checkpoint that are concatenated along O: two for gate and up.
    """
    device = rows.device.type
    if torch.is_autocast_enabled(device):
        rows = rows.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):
        output: Tensor = _GroupedLinear.apply(rows, weight, tuple(ends), rounding, matrices)
    return output


def rounded_matrices(expert: Tensor, rounding: WeightRounding, matrices: int) -> Tensor:
    """Round one expert's slice [O, I] of a parameter, each matrix of the checkpoint separately."""
    parts = [round_weight(part, rounding).value(rounding) for part in expert.chunk(matrices)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, ends: tuple[int, ...], rounding: WeightRounding, matrices: int
    ) -> Tensor:
        ctx.ends, ctx.rounded = ends, lambda expert: rounded_matrices(expert, rounding, matrices)
        # Like plain layers, frozen experts do not need their inputs in the backward pass.
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weight)
        output = rows.new_zeros(len(rows), weight.shape[1])
        for expert, first, last in _occupied(ends):
            rounded = ctx.rounded(weight[expert]).to(rows.dtype)
            # DeepSpeed's ZeRO-3 replaces `torch.nn.functional.linear` with a function that saves its weight.
            output[first:last] = torch.ops.aten.linear.default(rows[first:last], rounded)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        by_rows = gradient.new_zeros(len(gradient), weight.shape[2]) if ctx.needs_input_grad[0] else None
        by_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for expert, first, last in _occupied(ctx.ends):
            part = gradient[first:last]
            if by_rows is not None:
                by_rows[first:last] = part @ ctx.rounded(weight[expert]).to(part.dtype)
            if by_weight is not None:
                by_weight[expert] = part.t() @ rows[first:last]
        return by_rows, by_weight, None, None, None


def _occupied(ends: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (expert, first row, row after the last) for experts with rows."""
    first = 0
    for expert, last in enumerate(ends):
        if last > first:
            yield expert, first, last
        first = last


def is_lora_linear(module: Any) -> bool:
    """Return whether a module is PEFT's LoRA around a plain linear layer."""
    lora = _lora_class()
    return lora is not None and isinstance(module, lora) and isinstance(module.get_base_layer(), torch.nn.Linear)


def lora_errors(name: str, module: Any) -> list[ConfigError]:
    """Return why a LoRA layer cannot be rounded together with its weight."""
    where = f"LoRA of {name}"
    if len(module.active_adapters) != 1:
        value = ", ".join(module.active_adapters) or "none"
        rule = "exactly one adapter must be active"
        return [ConfigError(where=where, value=value, rule=rule, fix="activate one, and merge the others")]
    adapter = module.active_adapters[0]
    dropout = getattr(module.lora_dropout[adapter], "p", 0.0)
    variant = module.lora_variant.get(adapter)
    plain = "only plain and rank-stabilized LoRA add a product to the weight"
    wrong = (
        (variant is not None, type(variant).__name__, plain, "turn DoRA and other variants off"),
        (dropout, f"lora_dropout={dropout}", "a merged weight cannot drop inputs", "use lora_dropout=0"),
        (module.lora_B[adapter].bias is not None, "lora_bias", "a bias cannot be merged", "turn it off"),
        (module.merged, "merged", "the adapter is already merged into the weight", "unmerge it"),
    )
    return [ConfigError(where=where, value=value, rule=rule, fix=fix) for is_so, value, rule, fix in wrong if is_so]


def lora_matrices(module: Any) -> tuple[str, str, str]:
    """Return the relative names of a LoRA layer's weight, A and B."""
    adapter = module.active_adapters[0]
    return "base_layer.weight", f"lora_A.{adapter}.weight", f"lora_B.{adapter}.weight"


@cache
def _lora_class() -> Any:
    try:
        from peft.tuners.lora import Linear
    except ImportError:
        return None
    return Linear


@cache
def fake_quantized_lora() -> Any:
    """Return the class of LoRA layers that round the sum of weight and adapter."""
    lora = _lora_class()

    class FakeQuantizedLora(lora):  # type: ignore[misc,valid-type]
        """PEFT's LoRA layer, computing with ``round(W + scaling · B A)``."""

        quantizer: LayerQuantizer

        @property
        def consumed(self) -> tuple[str, ...]:
            return (*lora_matrices(self), *(name for name in LEARNED if name in self._parameters))

        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            quantizer = self.quantizer
            observe_inputs(quantizer, x, training=self.training)
            if not quantizer.state.enabled or self.disable_adapters or self.merged:
                plain: Tensor = super().forward(x, *args, **kwargs)
                return plain
            adapter = self.active_adapters[0]
            base = self.get_base_layer()
            quantizer.forward_dtype = base.weight.dtype
            tensors = LinearTensors(
                weight=base.weight,
                bias=base.bias,
                adapter_a=self.lora_A[adapter].weight,
                adapter_b=self.lora_B[adapter].weight,
                **rounding_tensors(self, quantizer, x.device),
            )
            return fake_quantized_linear(x, tensors, quantizer.rounding(adapter_scaling=self.scaling[adapter]))

        def stored_layers(self, parameters: Mapping[str, Tensor]) -> dict[str, StoredLayer]:
            """Return the stored form of the sum of weight and adapter."""
            return FakeQuantizedLinear.stored_layers(self, parameters)

    return FakeQuantizedLora


_SHOWN = 8


def some_names(names: Sequence[str]) -> str:
    """Return the first names of a list, and the number of others."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
