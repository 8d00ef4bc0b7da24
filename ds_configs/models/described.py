"""`ModelSpec` from a resolved configuration and the tensors of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from math import ceil
from typing import Any, Literal

from ..specs.dimensions import Dimensions
from ..specs.model import ModelSpec, ParameterShape

Task = Literal["causal_lm", "masked_lm", "seq2seq", "contrastive", "encoder", "other"]

_RESIDUAL_DROPOUTS = ("resid_pdrop", "residual_dropout", "hidden_dropout_prob", "hidden_dropout", "dropout")
"""Dropout of what attention and MLP add to the residual stream, as GPT-2, StarCoder2, BERT, Falcon and OPT call it."""
OTHER_SETTINGS = ("_token_id", "_version", "_token_index", "_range", "_name_or_path", "_hidden_states", "_attentions")
"""Ends of names that say nothing about a model's sizes or operators."""
_POSITION_TABLES = ("wpe", "position_embeddings", "position_embedding", "embed_positions")


def described_spec(
    *,
    config: Any,
    text: Any,
    values: Mapping[str, Any],
    name: str,
    revision: str | None,
    model_type: str,
    architecture: str,
    parameters: tuple[ParameterShape, ...],
    buffer_bytes: int,
    layer_classes: tuple[str, ...],
    tied_embeddings: bool,
    attention: str | None,
    source: Literal["config", "meta"],
) -> ModelSpec:
    """Return the specification of a model.

    Args:
        config: The configuration, its fields as attributes under each name that transformers knows them by.
        text: That of the text model, which is `config` where there are no parts.
        values: The configuration as a mapping, nested parts as mappings.
        name: What the user named.
        revision: Commit of a Hub repository.
        model_type: As `config.json` states it.
        architecture: The class that is built.
        parameters: All of its tensors, tied ones once.
        buffer_bytes: Its tensors that are no parameters.
        layer_classes: What FSDP wraps.
        tied_embeddings: Whether the head is the token embedding.
        attention: The implementation to count with, where it is not left to transformers.
        source: Where the tensors come from.
    """
    return ModelSpec(
        name=name,
        revision=revision,
        model_type=model_type,
        architecture=architecture,
        task=_task(architecture, encoder_decoder=bool(getattr(config, "is_encoder_decoder", False))),
        dimensions=_dimensions(text, parameters),
        parameters=parameters,
        buffer_bytes=buffer_bytes,
        layer_classes=layer_classes,
        tied_embeddings=tied_embeddings,
        learned_positions=_learned_positions(parameters, text),
        sliding_window=_sliding_window(text),
        attention=attention,
        residual_dropout_masks=_residual_dropout_masks(config),
        weight_conversion=any(p.kind == "experts" for p in parameters),
        settings=tuple(plain_settings(values)),
        source=source,
    )


def plain_settings(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    """Yield the plain values of a configuration and of those nested in it, which traced coefficients are read with."""
    for name, value in config.items():
        if isinstance(value, dict) and name.endswith("_config"):
            yield from plain_settings(value, f"{prefix}{name}.")
        elif isinstance(value, bool | int | float | str) and not name.endswith(OTHER_SETTINGS):
            yield prefix + name, value
        elif name == "layer_types" and isinstance(value, list):
            yield from ((f"{prefix}{name}={kind}", count) for kind, count in Counter(value).items())


def _residual_dropout_masks(config: Any) -> int:
    """Dropout masks of hidden size that a layer keeps; T5's MLP (`dropout_rate`) has one of its inner width as well."""
    if getattr(config, "dropout_rate", 0) and getattr(config, "d_ff", 0):
        inner: int = ceil(config.d_ff / config.d_model)
        return 3 + inner
    decodes = 1 if getattr(config, "is_encoder_decoder", False) else 0
    return 2 + decodes if any(getattr(config, name, 0) for name in _RESIDUAL_DROPOUTS) else 0


def _learned_positions(parameters: tuple[ParameterShape, ...], text: Any) -> int | None:
    """Rows of the text model's position table; some tables hold a few more rows than positions (OPT)."""
    rows = [
        parameter.shape[0]
        for parameter in parameters
        if "vision" not in parameter.name and any(table in parameter.module for table in _POSITION_TABLES)
    ]
    limit = getattr(text, "max_position_embeddings", None)
    return min(max(rows), limit or max(rows)) if rows else None


def _sliding_window(text: Any) -> int | None:
    if not getattr(text, "use_sliding_window", True):
        return None
    # Llama 4 looks back within chunks, which takes a mask as a window does.
    return _size(text, "sliding_window") or _size(text, "attention_chunk_size") or None


def _task(class_name: str, *, encoder_decoder: bool) -> Task:
    endings: tuple[tuple[str, Task], ...] = (
        ("ForCausalLM", "causal_lm"),
        ("LMHeadModel", "causal_lm"),
        ("ForMaskedLM", "masked_lm"),
        ("ForConditionalGeneration", "seq2seq" if encoder_decoder else "causal_lm"),
        ("CLIPModel", "contrastive"),
        ("SiglipModel", "contrastive"),
        ("Model", "encoder"),
    )
    return next((task for ending, task in endings if class_name.endswith(ending)), "other")


def _dimensions(text: Any, parameters: tuple[ParameterShape, ...]) -> Dimensions:
    hidden = _size(text, "hidden_size", "d_model")
    heads = _size(text, "num_attention_heads") or 1
    held = max((parameter.shape[0] for parameter in parameters if parameter.kind == "experts"), default=0)
    experts = _size(text, "num_local_experts", "num_experts", "n_routed_experts") or held
    intermediate = _size(text, "intermediate_size", "d_ff", "ffn_dim", "n_inner", "encoder_ffn_dim") or 4 * hidden
    has_dense_mlp = not experts or any(p.group == "mlp" and p.kind == "linear" for p in parameters)
    return Dimensions(
        num_layers=_size(text, "num_hidden_layers") or max((p.count for p in parameters if p.in_layer), default=0),
        hidden_size=hidden,
        intermediate_size=intermediate if has_dense_mlp else 0,
        num_attention_heads=heads,
        num_key_value_heads=_key_value_heads(text) or heads,
        head_dim=_size(text, "head_dim", "d_kv") or hidden // heads,
        vocab_size=_size(text, "vocab_size"),
        num_experts=experts,
        # A config that names it otherwise counts as one whose tokens visit all.
        experts_per_token=(_size(text, "num_experts_per_tok", "moe_topk") or experts) if experts else 0,
        expert_intermediate_size=_size(text, "moe_intermediate_size") or intermediate if experts else 0,
    )


def _key_value_heads(text: Any) -> int:
    """Return key/value heads; Falcon and GPT-BigCode say `multi_query` for a single one, whatever they count beside it.

    Falcon's newer decoder reads `num_kv_heads` instead (transformers/models/falcon/modeling_falcon.py).
    """
    if getattr(text, "multi_query", False) and not getattr(text, "new_decoder_architecture", False):
        return 1
    return _size(text, "num_key_value_heads", "num_kv_heads")


def _size(config: Any, *fields: str) -> int:
    """Return the first of the fields that holds a size, the largest where each layer has its own; 0 for none."""
    for field in fields:
        value = getattr(config, field, None)
        sizes = [item for item in (value if isinstance(value, list | tuple) else [value]) if isinstance(item, int)]
        if sizes and max(sizes) > 0:
            return max(sizes)
    return 0
