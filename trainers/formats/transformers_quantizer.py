"""Transformers' quantizer for the small format: `from_pretrained` makes the dense weights that its matrices stand for.

The model that is loaded is a dense one: it trains, and is saved, as any other.
"""

from __future__ import annotations

from typing import Any

from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from .spqr_format import INDEX, PARTS, QUANT_METHOD, SINGLE, checked_layers, read_matrix


@register_quantization_config(QUANT_METHOD)
class SmallFormatConfig(QuantizationConfigMixin):
    """Section of `config.json` for the small format: its weight files, and settings of every matrix by module name."""

    def __init__(self, layers: Any = None, weights: str = SINGLE, schema_version: Any = None, **others: Any) -> None:
        self.quant_method: Any = QUANT_METHOD
        self.schema_version = schema_version
        self.weights = INDEX if weights == INDEX else SINGLE
        self.layers = checked_layers(schema_version, layers, where="quantization_config")


class _Dequantize(ConversionOps):
    """Makes the dense weight from the parts of one matrix."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **known: Any
    ) -> dict[str, Any]:
        layer = known["full_layer_name"].removesuffix(".weight")
        parts = {f"{layer}.{pattern[2:-1]}": tensors[0] for pattern, tensors in input_dict.items()}
        settings = known["config"].quantization_config.layers.get(layer, {})
        return {known["full_layer_name"]: read_matrix(layer, settings, parts, where="small format").dequantize()}


@register_quantizer(QUANT_METHOD)
class SmallFormatQuantizer(HfQuantizer):
    """Loads packed matrices as dense weights and leaves a model without a quantization config."""

    requires_calibration = True

    def update_tp_plan(self, config: Any) -> Any:
        """Name the weight files, which Transformers would not look for; no other hook comes before it does."""
        config.transformers_weights = config.quantization_config.weights
        return config

    def get_weight_conversions(self) -> list[WeightConverter]:
        """Return one conversion for each kind of matrix."""
        return [
            WeightConverter([rf"\.{name}$" for name in parts], ".weight", [_Dequantize()]) for parts in PARTS.values()
        ]

    def postprocess_model(self, model: Any, **kwargs: Any) -> Any:
        """Make the model an ordinary dense one."""
        del model.config.transformers_weights
        # Saving would undo every conversion of loading (transformers 5.17.0, `revert_weight_conversion`).
        kept = [
            each
            for each in model._weight_conversions
            if not (isinstance(each, WeightConverter) and isinstance(each.operations[0], _Dequantize))
        ]
        model._weight_conversions = kept or None
        self.remove_quantization_config(model)
        return model

    def is_serializable(self) -> bool:
        """Return True: what is saved is the dense model."""
        return True

    @property
    def is_trainable(self) -> bool:
        """True: weights are dense."""
        return True
