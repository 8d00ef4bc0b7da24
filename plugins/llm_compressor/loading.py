"""Weights of a model that is to be quantized, with the experts of mixtures as linear layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...ds_configs.specs.errors import Fault, RefusedInputError
from ..transformers.finite_weights import nonfinite_weights
from ..transformers.quantization_source import QuantizationSource
from ..transformers.sound_model import check_config, loading_faults, refused_by_name
from .fixes import kept_conversion_mappings, torchvision_is_not_needed


def load_for_quantization(source: QuantizationSource) -> Any:
    """Load the weights and return the model, with the experts of mixtures as linear layers.

    Raises:
        RefusedInputError: tensors are missing, of another shape, or hold NaN or infinity.
        ShardwrightError: Transformers cannot load it.
    """
    from transformers import AutoModelForCausalLM

    named: dict[str, Any] = {"dtype": "auto", "trust_remote_code": False, "use_safetensors": True}
    where, found = str(source.directory), {}
    check_config(where)
    with refused_by_name(source.name):
        if any(layer.is_expert for layer in source.layers):
            model = _load_with_linear_experts(AutoModelForCausalLM, where, named)
        else:
            named |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
            model, found = AutoModelForCausalLM.from_pretrained(where, **named)
    faults = loading_faults(found, source.name)
    faults += [
        Fault(where=source.name, value=name, rule="holds NaN or infinity", fix="train it again, or fetch a sound copy")
        for name in nonfinite_weights(model)
    ]
    if faults:
        raise RefusedInputError(faults)
    return model.eval()


def _load_with_linear_experts(model_class: Any, where: str, named: Mapping[str, Any]) -> Any:
    """Load a mixture; llmcompressor 0.14.0.1 cannot pass on `output_loading_info` (AttributeError on the pair)."""
    from llmcompressor.utils import load_context

    with torchvision_is_not_needed(), kept_conversion_mappings(), load_context(model_class):
        return model_class.from_pretrained(where, **named)
