"""Linear layers that compute with fake-quantized weights and inputs: plain and LoRA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from peft.tuners.lora import Linear as LoraLinear

from ....ds_configs.quantization.scheme import QuantizationScheme
from ....ds_configs.specs.errors import ConfigError
from ....plugins.compressed_tensors.codes import RoundedWeight
from .rounding import Rounding, WeightRule, input_gradient, round_inputs, round_weight, weight_gradients

if TYPE_CHECKING:
    from torch import Tensor

    from .observers import InputRange


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
    adapter_a: Tensor | None = None
    """LoRA's A [rank, I]."""
    adapter_b: Tensor | None = None
    """LoRA's B [O, rank]."""


def fake_quantized_linear(inputs: Tensor, tensors: LinearTensors, rounding: Rounding) -> Tensor:
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
                by_rounded.to(merged.dtype), merged, rounding, tensors.weight_scale, tensors.weight_zero_point
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


def _merged(tensors: LinearTensors, rounding: Rounding) -> Tensor:
    return merged_weight(tensors.weight, tensors.adapter_a, tensors.adapter_b, rounding.adapter_scaling)


def _rounded(merged: Tensor, tensors: LinearTensors, rounding: Rounding) -> Tensor:
    rounded = round_weight(merged, rounding, tensors.weight_scale, tensors.weight_zero_point)
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

    def rounding(self, *, adapter_scaling: float = 0.0) -> Rounding:
        """Return the rounding of a forward pass."""
        return Rounding(
            quantization=self.scheme.weights,
            rule=self.state.rule,
            stored_dtype=self.stored_dtype,
            inputs=self.scheme.activations,
            adapter_scaling=adapter_scaling,
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
        adapter: tuple[Tensor, Tensor] | tuple[None, None] = (None, None),
        scaling: float = 0.0,
    ) -> Tensor:
        """Return the outputs of a layer, rounded with the learned scales of its module and the stored input range.

        Raises:
            UsageError: the range has no values yet.
        """
        self.forward_dtype = weight.dtype
        learned = [getattr(module, name, None) for name in LEARNED]
        stored = (None, None) if self.input_range is None else self.input_range.on(inputs.device)
        tensors = LinearTensors(weight, bias, *learned, *stored, *adapter)
        return fake_quantized_linear(inputs, tensors, self.rounding(adapter_scaling=scaling))

    def stored_layer(self, weight: Tensor, parameters: Mapping[str, Tensor]) -> RoundedWeight:
        """Return the stored form of a matrix [O, I] in the dtype of the forward pass, with learned scales if any."""
        rounded = round_weight(weight, self.rounding(), *(parameters.get(name) for name in LEARNED))
        stored = (None, None) if self.input_range is None else self.input_range.on(weight.device)
        return replace(rounded, codes=rounded.codes.to(torch.int8), input_scale=stored[0], input_zero_point=stored[1])


class _FakeQuantized:
    """What rounding layers have in common."""

    quantizer: LayerQuantizer
    _parameters: dict[str, Any]

    @property
    def quantizers(self) -> dict[str, LayerQuantizer]:
        """The quantizer of the only matrix, by its relative name."""
        return {"": self.quantizer}

    @property
    def consumed(self) -> tuple[str, ...]:
        """Parameters that the packed form replaces."""
        own = lora_matrices(self) if isinstance(self, LoraLinear) else ("weight",)
        return (*own, *(name for name in LEARNED if name in self._parameters))

    def stored_layers(self, parameters: Mapping[str, Tensor]) -> dict[str, RoundedWeight]:
        """Return the stored form of the matrix, adapter included, given the full parameters of this module."""
        return {"": self.quantizer.stored_layer(forward_weight(self, parameters), parameters)}


class FakeQuantizedLinear(_FakeQuantized, torch.nn.Linear):
    """Linear layer whose forward pass computes with the numbers of the checkpoint."""

    def forward(self, input: Tensor) -> Tensor:
        """Return ``round(x) · round(W)ᵀ + bias`` [..., O]; without rounding before `start_step`."""
        self.quantizer.observe(input, training=self.training)
        if not self.quantizer.state.enabled:
            return super().forward(input)
        return self.quantizer.linear(self, input, self.weight, self.bias)


class FakeQuantizedLora(_FakeQuantized, LoraLinear):
    """PEFT's LoRA layer, computing with ``round(W + scaling · B A)``."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.quantizer.observe(x, training=self.training)
        if not self.quantizer.state.enabled or self.disable_adapters or self.merged:
            plain: Tensor = super().forward(x, *args, **kwargs)
            return plain
        base, name = self.get_base_layer(), self.active_adapters[0]
        adapter = (self.lora_A[name].weight, self.lora_B[name].weight)
        return self.quantizer.linear(self, x, base.weight, base.bias, adapter, self.scaling[name])


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


def is_lora_linear(module: Any) -> bool:
    """Return whether a module is PEFT's LoRA around a plain linear layer."""
    return isinstance(module, LoraLinear) and isinstance(module.get_base_layer(), torch.nn.Linear)


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


def some_names(names: Sequence[str]) -> str:
    """Return the first names of a list, and the number of others."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
