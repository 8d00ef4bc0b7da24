"""From what a user names to a `ModelSpec`: the closed form where there is one, else the meta device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ...ds_configs.models.families import model_spec_from_config
from ...ds_configs.specs.model import ModelSpec
from ..huggingface_hub.hub import read_model_source


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A model specification with what a user should know about its source."""

    spec: ModelSpec
    config: dict[str, Any]
    """The validated `config.json`, from which activations are traced when none are stored."""
    notes: tuple[str, ...]
    """Remarks about the source, such as a quantized checkpoint."""


def load_model_spec(model: str, *, revision: str | None = None) -> LoadedModel:
    """Return the specification of a Hub id, local directory or `config.json`; torch loads only for rarer families.

    Raises:
        UsageError: nothing of that name exists.
        RefusedInputError: the configuration or a safetensors header is corrupt, absurd or needs foreign code.
        ShardwrightError: the Hub cannot be reached or denies access.
    """
    source = read_model_source(model, revision=revision)
    spec = model_spec_from_config(source.config, name=source.name, revision=source.revision)
    if spec is None:
        from ..transformers.meta_model import model_spec_from_meta

        spec = model_spec_from_meta(source.config, name=source.name, revision=source.revision)
    spec = replace(
        spec,
        layer_types=_layer_types(source.config),
        attention=_attention(source.config) or spec.attention,
        rope_type=_rope_type(source.config),
    )
    notes = []
    method = (source.config.get("quantization_config") or {}).get("quant_method")
    if method is not None:
        notes.append(f"the checkpoint is quantized ({method}); the plan counts its weights in training precision")
    stored = source.checkpoint_parameters
    if method is None and stored is not None and not _counts_agree(spec, stored):
        notes.append(f"the checkpoint holds {stored:,} parameters, {spec.architecture} has {spec.parameter_count:,}")
    return LoadedModel(spec=spec, config=source.config, notes=tuple(notes))


def _layer_types(config: dict[str, Any]) -> tuple[str, ...]:
    named = config.get("layer_types")
    return tuple(sorted({str(kind) for kind in named})) if isinstance(named, list) else ()


def _attention(config: dict[str, Any]) -> str | None:
    asked = config.get("attn_implementation", config.get("_attn_implementation"))
    return asked if isinstance(asked, str) else None


def _rope_type(config: dict[str, Any]) -> str:
    section = config.get("rope_parameters") or config.get("rope_scaling")
    named = section.get("rope_type", section.get("type")) if isinstance(section, dict) else None
    return named if isinstance(named, str) and named != "default" else ""


def _counts_agree(spec: ModelSpec, stored: int) -> bool:
    """Checkpoints may hold a tied head twice and old rotary tables, so a quarter of a percent is tolerated."""
    tied_head = spec.dimensions.vocab_size * spec.dimensions.hidden_size if spec.tied_embeddings else 0
    return any(abs(stored - count) <= count / 400 for count in (spec.parameter_count, spec.parameter_count + tied_head))
