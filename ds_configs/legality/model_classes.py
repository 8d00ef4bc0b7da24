"""Rules about the model classes that support quantization, after or during training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from ..specs.errors import ConfigError

Work = Literal["quantize", "qat"]
_READS_WEIGHTS = "it reads weights of linear layers outside their forward, but loaded quantized layers have none"
_FUSED_EXPERTS = (
    "Transformers and compressed-tensors store its experts in different layouts, so that none can load them"
)
_UNVISITED = "llm-compressor skips some of its layers, which would stay dense in a checkpoint marked as quantized"
_LAYERS_DIFFER = "its layers have different sizes, but llm-compressor assumes equal ones"
_PART = "it is a part of a model, which Transformers does not load separately"
UNSUPPORTED: Mapping[str, tuple[tuple[Work, ...], str]] = {
    **dict.fromkeys(
        ("gpt_bigcode", "mamba", "falcon_mamba", "mamba2", "modernbert-decoder", "nanochat", "recurrent_gemma", "rwkv"),
        (("qat", "quantize"), _READS_WEIGHTS),
    ),
    "falcon": (("quantize",), _READS_WEIGHTS),
    **dict.fromkeys(
        (
            "gpt_oss",
            "granitemoe",
            "granitemoe_swa",
            "granitemoeshared",
            "inkling_text",
            "llama4_text",
            "phimoe",
            "zaya",
        ),
        (("quantize",), _FUSED_EXPERTS),
    ),
    "minimax_m3_vl_text": (("quantize",), _FUSED_EXPERTS),
    **dict.fromkeys(("axk2", "hy_v3", "hy_v4", "kimi_linear", "laguna"), (("quantize",), _UNVISITED)),
    **dict.fromkeys(("gemma4", "gemma4_text", "gemma4_unified_text"), (("quantize",), _LAYERS_DIFFER)),
    "hrm_text": (("qat", "quantize"), "it runs its layers several times, but loads fewer layers than it has"),
    "emu3_text_model": (("qat", "quantize"), _PART),
    "mllama_text_model": (("qat", "quantize"), _PART),
    "roc_bert": (("qat",), "it changes outputs of linear layers in place, but rounding needs them for its gradient"),
}
"""`model_type`s whose quantized checkpoints fail to load or compute other results: the affected work, and the reason
(transformers 5.17.0, llmcompressor 0.14.0.1, compressed-tensors 0.19.0)."""
LINEAR_TARGETS = ("Linear", "Module")
"""Scheme targets that match every linear layer."""


def model_class_errors(
    architecture: str,
    *,
    work: Work,
    is_causal: bool,
    is_encoder_decoder: bool,
    model_type: str = "",
    transposed_layers: Sequence[str] = (),
    targets: Sequence[str] = ("Linear",),
) -> list[ConfigError]:
    """Return the errors of quantizing a model class; empty if it is supported.

    >>> [str(error) for error in model_class_errors("T5Model", work="quantize", is_causal=False,
    ...                                             is_encoder_decoder=True)]
    ["architecture = 'T5Model': must be a causal language model, not an encoder-decoder: calibration and verification \
run causal language models; choose a causal language model"]
    """
    errors = []
    if work == "quantize" and (is_encoder_decoder or not is_causal):
        rule = "must be a causal language model: Transformers would load it as a different class from the trained one"
        if is_encoder_decoder:
            rule = "must be a causal language model, not an encoder-decoder: calibration and verification run causal "
            rule += "language models"
        fix = "choose a causal language model"
        errors.append(ConfigError(where="architecture", value=architecture, rule=rule, fix=fix))
    unsupported_work, reason = UNSUPPORTED.get(model_type, ((), ""))
    if work in unsupported_work:
        fix = "keep the model dense" if work == "quantize" else "train without rounding"
        rule = f"does not support {'quantization' if work == 'quantize' else 'quantization-aware training'}: {reason}"
        errors.append(ConfigError(where="model_type", value=model_type, rule=rule, fix=fix))
    if transposed_layers and any(target in LINEAR_TARGETS for target in targets):
        rule = (
            f"has {len(transposed_layers)} transposed matrices in Conv1D layers, such as {transposed_layers[0]}, but "
            "compressed-tensors supports linear layers only"
        )
        fix = "use a model with linear layers" + (", or list the linear layers as targets" if work == "qat" else "")
        errors.append(ConfigError(where="architecture", value=architecture, rule=rule, fix=fix))
    return errors
