"""Quantizer of Transformers for the small format: `from_pretrained` loads it as an ordinary dense model.

Importing this module registers the format.
"""

from __future__ import annotations

from typing import Any

from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from .spqr import INDEX, PARTS, QUANT_METHOD, SINGLE, checked_layers, read_matrix


@register_quantization_config(QUANT_METHOD)
class SmallFormatConfig(QuantizationConfigMixin):
    """Section of `config.json` for the small format: weight files, and settings of every matrix by module name."""

    def __init__(
        self, layers: object = None, weights: str = SINGLE, schema_version: object = None, **others: object
    ) -> None:
        self.quant_method: Any = QUANT_METHOD
        self.schema_version = schema_version
        self.weights = INDEX if weights == INDEX else SINGLE
        self.layers = checked_layers(schema_version, layers, where="quantization_config")


class _Dequantize(ConversionOps):
    """Computes a dense weight from the tensors of its matrix."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **context: Any
    ) -> dict[str, Any]:
        layer = context["full_layer_name"].removesuffix(".weight")
        parts = {f"{layer}.{pattern[2:-1]}": tensors[0] for pattern, tensors in input_dict.items()}
        settings = context["config"].quantization_config.layers.get(layer, {})
        return {context["full_layer_name"]: read_matrix(layer, settings, parts, where="small format").dequantize()}


@register_quantizer(QUANT_METHOD)
class SmallFormatQuantizer(HfQuantizer):
    """Loads packed matrices as dense weights, and removes the quantization config."""

    requires_calibration = True

    def update_tp_plan(self, config: Any) -> Any:
        """Set the names of the weight files; no other hook runs before Transformers looks for them."""
        config.transformers_weights = config.quantization_config.weights
        return config

    def get_weight_conversions(self) -> list[WeightConverter]:
        """Return one conversion per kind of matrix."""
        return [
            WeightConverter([rf"\.{name}$" for name in parts], ".weight", [_Dequantize()]) for parts in PARTS.values()
        ]

    def postprocess_model(self, model: Any, **kwargs: Any) -> Any:
        """Remove all traces of the format from the dense model."""
        del model.config.transformers_weights
        # Saving would undo every conversion of loading (transformers 5.17.0, `revert_weight_conversion`).
        conversions = [
            conversion
            for conversion in model._weight_conversions
            if not (isinstance(conversion, WeightConverter) and isinstance(conversion.operations[0], _Dequantize))
        ]
        model._weight_conversions = conversions or None
        self.remove_quantization_config(model)
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True


def register_small_format() -> None:
    """Let `AutoModelForCausalLM.from_pretrained` load the small format as a dense model.

    Importing this module has already registered the format, so further calls have no effect.

    >>> register_small_format()
    >>> AutoModelForCausalLM.from_pretrained("out/small", dtype="auto")  # doctest: +SKIP
    """
