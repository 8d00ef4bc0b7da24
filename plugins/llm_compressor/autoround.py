"""AutoRound as a modifier of llm-compressor, corrected (observed with llmcompressor 0.14.0.1, auto-round 0.15.1)."""

from __future__ import annotations

import functools
import logging
import os
from typing import TYPE_CHECKING, Any

from ...ds_configs.quantization.scheme import QuantizationScheme
from ...ds_configs.specs.errors import ConfigError
from ..compressed_tensors.codes import code_range

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def head_errors(model: PreTrainedModel, scheme: QuantizationScheme) -> list[ConfigError]:
    """Return the error of a head among the targets, which AutoRound would round without learning."""
    from compressed_tensors.utils import match_named_modules

    head = model.get_output_embeddings()
    matches = match_named_modules(model, list(scheme.targets), list(scheme.ignore))
    rule = "learns the rounding only of decoder layers, but the head is among the targets"
    return [
        ConfigError(where="method", value="autoround", rule=rule, fix=f"add {name} to --ignore")
        for name, module in matches
        if module is head
    ]


@functools.cache
def exact_autoround() -> type[Any]:
    """Return llm-compressor's modifier with zero points, dtypes and settings of the process kept as they were."""
    import torch
    from llmcompressor.modifiers.autoround import AutoRoundModifier

    # Its warnings are about the settings with which llm-compressor calls it; its handler prints to stderr.
    logging.getLogger("autoround").setLevel(logging.ERROR)

    class ExactAutoRound(AutoRoundModifier):
        def apply_autoround(self, state: Any, modules: Any) -> None:
            """Learn a block; undo deterministic algorithms, which AutoRound switches on (`compressors/base.py`)."""
            variable = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
            enabled = torch.are_deterministic_algorithms_enabled()
            warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
            dtypes = {weight: weight.dtype for module in modules or () for weight in module.parameters()}
            try:
                super().apply_autoround(state, modules)
            finally:
                torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
                if variable is None:
                    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
            # AutoRound computes in fp32 if the processor has no bf16, and does not convert the model back.
            for weight, dtype in dtypes.items():
                weight.data = weight.data.to(dtype)

        def _postprocess_qparams(self, model: Any, registered: dict[str, dict[str, torch.Tensor]]) -> None:
            """Copy zero points too: AutoRound counts codes from 0, compressed-tensors from the lowest code."""
            super()._postprocess_qparams(model, registered)
            for name, module in model.named_modules():
                zero_point = vars(module).pop("zp", None)
                if zero_point is not None and "weight_zero_point" in registered.get(name, {}):
                    lowest, _ = code_range(module.quantization_scheme.weights.num_bits)
                    shift = torch.as_tensor(zero_point).expand_as(module.weight_scale) + lowest
                    module.weight_zero_point.data.copy_(shift)

    ExactAutoRound.__name__ = "AutoRoundModifier"
    return ExactAutoRound
