"""Classes of models that can be quantized, after training or in it: decided by what a class is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from ..specs.errors import Fault

Work = Literal["quantize", "qat"]
_READS_WEIGHTS = (
    "reads the weights of linear layers past their forward, and rounded layers have none when they are loaded"
)
_FUSED_EXPERTS = (
    "keeps experts as Transformers and compressed-tensors lay out otherwise, so that nothing loads them again"
)
_UNVISITED = (
    "calls layers that llm-compressor does not visit, so that they would stay dense in a checkpoint that says otherwise"
)
_LAYERS_DIFFER = "has sizes of each layer, which llm-compressor reads once for all"
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
    "hrm_text": (("qat", "quantize"), "runs its layers several times over, and loads fewer than it has"),
    "emu3_text_model": (("qat", "quantize"), "is a part of a model, which Transformers does not load by itself"),
    "mllama_text_model": (("qat", "quantize"), "is a part of a model, which Transformers does not load by itself"),
    "roc_bert": (("qat",), "changes what linear layers return in place, which rounding needs for its gradient"),
}
"""`model_type`s whose checkpoints were not found to load and compute the same, for which work, and why (transformers
5.17.0, llmcompressor 0.14.0.1, compressed-tensors 0.19.0)."""
LINEAR_TARGETS = ("Linear", "Module")
"""Targets of a scheme that mean every linear layer."""


def model_class_faults(
    architecture: str,
    *,
    work: Work,
    is_causal: bool,
    is_encoder_decoder: bool,
    model_type: str = "",
    transposed_layers: Sequence[str] = (),
    targets: Sequence[str] = ("Linear",),
) -> list[Fault]:
    """Return why a class of models cannot be quantized; empty where it can.

    Args:
        architecture: Name of the class, as in `config.json`.
        work: `quantize` for methods after training, `qat` for quantization-aware training.
        is_causal: Whether the class is a causal language model of Transformers.
        is_encoder_decoder: As in `config.json`.
        model_type: As in `config.json`, that of the text model where there are several.
        transposed_layers: Names of layers of Transformers' `Conv1D`, which stores [in, out].
        targets: Of the scheme; layers that are named one by one leave others out on purpose.

    >>> [str(fault) for fault in model_class_faults("T5Model", work="quantize", is_causal=False,
    ...                                             is_encoder_decoder=True)]
    ["architecture = 'T5Model': is an encoder with a decoder: calibration, the check of what was written and the \
evaluation run causal language models; give a causal language model"]
    """
    faults = []
    if is_encoder_decoder and work == "quantize":
        rule = (
            "is an encoder with a decoder: calibration, the check of what was written and the evaluation run causal "
            "language models"
        )
        faults.append(Fault(where="architecture", value=architecture, rule=rule, fix="give a causal language model"))
    elif not is_causal and work == "quantize":
        rule = "is no causal language model, and would be loaded as another class than it was trained as"
        faults.append(Fault(where="architecture", value=architecture, rule=rule, fix="give a causal language model"))
    refused_for, why = UNSUPPORTED.get(model_type, ((), ""))
    if work in refused_for:
        fix = "leave it dense" if work == "quantize" else "train it without rounding"
        faults.append(Fault(where="model_type", value=model_type, rule=why, fix=fix))
    if transposed_layers and any(target in LINEAR_TARGETS for target in targets):
        rule = (
            f"keeps {len(transposed_layers)} matrices in Conv1D, such as {transposed_layers[0]}, which stores them "
            "transposed: compressed-tensors packs linear layers alone"
        )
        fix = "use a model of linear layers"
        if work == "qat":
            fix += ", or name the linear layers that you want as targets"
        faults.append(Fault(where="architecture", value=architecture, rule=rule, fix=fix))
    return faults
