"""Linear layers that round, by a change of class: parameters, hooks and state-dict keys stay as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ....ds_configs.quantization.scheme import QuantizationScheme
from ....plugins.compressed_tensors.codes import StoredLayer
from .fake_quantized_linear import LinearRounding, LinearTensors, fake_quantized_linear
from .rounding import WeightRounding, WeightRule, round_weight, stored_scale, stored_zero_point

if TYPE_CHECKING:
    from torch import Tensor

    from .attachment import QuantizationState
    from .input_ranges import InputRange

WEIGHT_SCALE, WEIGHT_ZERO_POINT = "learned_weight_scale", "learned_weight_zero_point"
INPUT_SCALE, INPUT_ZERO_POINT = "learned_input_scale", "learned_input_zero_point"
LEARNED = (WEIGHT_SCALE, WEIGHT_ZERO_POINT, INPUT_SCALE, INPUT_ZERO_POINT)
"""Names of the parameters that a layer gets where scales are learned."""


@dataclass(kw_only=True)
class LayerQuantizer:
    """Rounding of one matrix; hangs on its module as a plain attribute, so that no key is added to a state dict."""

    name: str
    """Of the layer in the checkpoint."""
    scheme: QuantizationScheme
    """The numbers of the checkpoint."""
    rule: WeightRule
    """Where scales come from."""
    stored_dtype: torch.dtype
    """Type of scales in the checkpoint."""
    state: QuantizationState
    """Shared with all layers of the model."""
    input_range: InputRange | None = None
    """Stored range of the inputs; `None` unless the scheme has one."""
    forward_dtype: torch.dtype | None = None
    """Type of the weight in the last forward pass: FSDP2's policies show another one than they keep."""

    def rounding(self, *, adapter_scaling: float = 0.0, ranks: Any = None) -> LinearRounding:
        """Return what a forward pass does at this step.

        Args:
            adapter_scaling: As in `LinearRounding`.
            ranks: As in `WeightRounding`.
        """
        weights = self.scheme.weights
        if self.state.bits is not None and self.state.bits != weights.bits:
            weights = replace(weights, bits=self.state.bits)
        weight = WeightRounding(quantization=weights, rule=self.rule, stored_dtype=self.stored_dtype, ranks=ranks)
        return LinearRounding(weight=weight, inputs=self.scheme.activations, adapter_scaling=adapter_scaling)

    def stored_layer(
        self,
        weight: Tensor,
        *,
        scale: Tensor | None = None,
        zero_point: Tensor | None = None,
        input_scale: Tensor | None = None,
        input_zero_point: Tensor | None = None,
    ) -> StoredLayer:
        """Return the trained codes of a matrix [O, I] in the type that forward passes saw, with all that is stored."""
        rounding = self.rounding()
        rounded = round_weight(weight, rounding.weight, scale, zero_point)
        activations = self.scheme.activations
        if self.scheme.activations_are_static and input_scale is None:
            assert self.input_range is not None, "a scheme of stored ranges gives every layer one"
            input_scale, input_zero_point = self.input_range.on(weight.device)
        input_bits = 8 if activations is None else activations.bits
        return StoredLayer(
            codes=rounded.levels.to(torch.int8),
            scale=rounded.scale,
            zero_point=rounded.zero_point,
            input_scale=None if input_scale is None else stored_scale(input_scale, self.stored_dtype),
            input_zero_point=None if input_zero_point is None else stored_zero_point(input_zero_point, input_bits),
        )


class FakeQuantizedLinear(torch.nn.Linear):
    """A linear layer whose forward pass computes with the numbers of the checkpoint."""

    quantizer: LayerQuantizer

    @property
    def consumed(self) -> tuple[str, ...]:
        """Own parameters that the packed form takes the place of."""
        return ("weight", *(name for name in LEARNED if name in self._parameters))

    def forward(self, input: Tensor) -> Tensor:
        """Return ``round(x) · round(W)ᵀ + bias`` [..., O]; plain where rounding has not begun."""
        quantizer = self.quantizer
        observe_inputs(quantizer, input, training=self.training)
        if not quantizer.state.enabled:
            return super().forward(input)
        quantizer.forward_dtype = self.weight.dtype
        tensors = LinearTensors(weight=self.weight, bias=self.bias, **rounding_tensors(self, quantizer, input.device))
        return fake_quantized_linear(input, tensors, quantizer.rounding())

    def stored_layers(self, parameters: Mapping[str, Tensor]) -> dict[str, StoredLayer]:
        """Return what the checkpoint holds in place of the weight, from the whole parameters of this module."""
        seen = self.quantizer.forward_dtype
        weight = parameters["weight"] if seen is None else parameters["weight"].to(seen)
        return {"": stored_from(self.quantizer, weight, parameters)}


def observe_inputs(quantizer: LayerQuantizer, inputs: Tensor, *, training: bool) -> None:
    """Let the range of a layer see its inputs, if ranges are being observed."""
    found = quantizer.input_range
    if found is not None and quantizer.state.observing and (training or found.calibrating):
        found.observe(inputs)


def rounding_tensors(module: torch.nn.Module, quantizer: LayerQuantizer, device: torch.device) -> dict[str, Any]:
    """Return scales and zero points for a forward pass: learned parameters, or the stored range of the inputs.

    Raises:
        UsageError: the range is not known yet.
    """
    found: dict[str, Any] = {
        "weight_scale": getattr(module, WEIGHT_SCALE, None),
        "weight_zero_point": getattr(module, WEIGHT_ZERO_POINT, None),
        "input_scale": getattr(module, INPUT_SCALE, None),
        "input_zero_point": getattr(module, INPUT_ZERO_POINT, None),
    }
    if found["input_scale"] is None and quantizer.input_range is not None:
        found["input_scale"], found["input_zero_point"] = quantizer.input_range.on(device)
    return found


def stored_from(quantizer: LayerQuantizer, weight: Tensor, parameters: Mapping[str, Tensor]) -> StoredLayer:
    """Return what the checkpoint holds of a weight [O, I] in the type of the forward pass, and of its parameters."""
    return quantizer.stored_layer(
        weight,
        scale=parameters.get(WEIGHT_SCALE),
        zero_point=parameters.get(WEIGHT_ZERO_POINT),
        input_scale=parameters.get(INPUT_SCALE),
        input_zero_point=parameters.get(INPUT_ZERO_POINT),
    )
