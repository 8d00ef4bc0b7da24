"""Parts of Transformers' causal language models by their names, and the attention masks that their layers take.

Seen with transformers 5.17.0 (`models/*/modeling_*.py`): embedding, decoder layers, final norm and head are modules of
their own; what lies between them in `forward` is one line each: GPT-2 adds learned positions and drops out, Gemma-2
caps its logits. Each family makes its masks in one of three ways.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ...ds_configs.legality.pipeline import PIPELINE_MODEL_TYPES
from ...ds_configs.specs.errors import Fault, UsageError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineFamily:
    """Names of a causal language model's parts, as in its checkpoint."""

    embedding: str = "model.embed_tokens"
    """Token embedding."""
    position_embedding: str = ""
    """Learned table of absolute positions that is added to the tokens' embedding; empty for rotary ones."""
    dropout: str = ""
    """Dropout behind the embedding; empty for none."""
    rotary: str = "model.rotary_emb"
    """What turns position ids into cosines and sines; empty for learned positions."""
    layers: str = "model.layers"
    """List of decoder layers."""
    norm: str = "model.norm"
    """Norm behind the last layer."""
    head: str = "lm_head"
    """Projection onto the vocabulary."""
    windows: Literal["never", "everywhere", "by_layer"] = "never"
    """Layers that look back `sliding_window` tokens only, where the config has a window."""


_FAMILIES = {
    "gemma2": PipelineFamily(windows="by_layer"),
    "gpt2": PipelineFamily(
        embedding="transformer.wte",
        position_embedding="transformer.wpe",
        dropout="transformer.drop",
        rotary="",
        layers="transformer.h",
        norm="transformer.ln_f",
    ),
    "llama": PipelineFamily(),
    "mistral": PipelineFamily(windows="everywhere"),
    "phi3": PipelineFamily(windows="everywhere"),
    "qwen2": PipelineFamily(windows="by_layer"),
    "qwen3": PipelineFamily(windows="by_layer"),
}
assert tuple(_FAMILIES) == PIPELINE_MODEL_TYPES


def pipeline_family(model: Any) -> PipelineFamily:
    """Return the family of a Transformers model.

    Raises:
        UsageError: The model is of another family or task, has cross-attention, or is wrapped or quantized.
    """
    faults = _model_faults(model)
    if faults:
        raise UsageError(faults)
    return _FAMILIES[model.config.model_type]


def _model_faults(model: Any) -> list[Fault]:
    name, config = type(model).__name__, getattr(model, "config", None)
    if hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False):
        rule = "pipelines train whole models, not adapters"
        return [Fault(where="model", value=name, rule=rule, fix="merge the adapter, or train it with ZeRO")]
    model_type = getattr(config, "model_type", None)
    if model_type not in _FAMILIES:
        rule = f"pipelines are made of {', '.join(PIPELINE_MODEL_TYPES)}"
        return [Fault(where="model.config.model_type", value=model_type, rule=rule, fix="use ZeRO-3 for this model")]
    faults = []
    if not name.endswith(("ForCausalLM", "GPT2LMHeadModel")):
        fix = "use AutoModelForCausalLM"
        faults.append(Fault(where="model", value=name, rule="pipelines end in a language modelling head", fix=fix))
    if getattr(config, "add_cross_attention", False):
        faults.append(Fault(where="model.config.add_cross_attention", value=True, rule="has no encoder in a pipeline"))
    if getattr(model, "is_quantized", False) or getattr(config, "quantization_config", None) is not None:
        rule = "quantized weights are not trained in a pipeline"
        faults.append(Fault(where="model", value=name, rule=rule, fix="load it in 16 or 32 bit"))
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    if frozen:
        rule = "pipelines train all weights of a model"
        faults.append(Fault(where="model", value=frozen[0], rule=rule, fix="set requires_grad of all parameters"))
    return faults


def attention_masks(
    family: PipelineFamily,
    config: Any,
    hidden_BSD: Tensor,
    attention_mask_BS: Tensor | None,
    position_ids_BS: Tensor,
    layers: range,
) -> dict[int, Any]:
    """Return each layer's attention mask as Transformers makes it for the model's attention implementation.

    Args:
        family: Family of the model.
        config: Config of the model.
        hidden_BSD: What the first of the layers reads; only shape, dtype and device count.
        attention_mask_BS: 1 for tokens and 0 for padding; `None` when nothing is padded.
        position_ids_BS: Positions, [1 or B, S]; without a padding mask they tell packed sequences apart.
        layers: Indices of the layers in the model.
    """
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    makers = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
    kinds = {layer: _mask_kind(family, config, layer) for layer in layers}
    made = {
        kind: makers[kind](
            config=config,
            inputs_embeds=hidden_BSD,
            attention_mask=attention_mask_BS,
            past_key_values=None,
            position_ids=position_ids_BS,
        )
        for kind in sorted(set(kinds.values()))
    }
    return {layer: made[kind] for layer, kind in kinds.items()}


def _mask_kind(family: PipelineFamily, config: Any, layer: int) -> str:
    if family.windows == "by_layer":
        return str(config.layer_types[layer])
    windowed = family.windows == "everywhere" and config.sliding_window is not None
    return "sliding_attention" if windowed else "full_attention"
