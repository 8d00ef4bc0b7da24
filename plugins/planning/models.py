"""From what a user names to a `ModelSpec`: the closed form where there is one, else the meta device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ...ds_configs.models.families import model_spec_from_config
from ...ds_configs.models.stored_shapes import model_spec_from_shapes
from ...ds_configs.models.structure import model_spec_from_structure
from ...ds_configs.specs.model import ModelSpec
from ..huggingface_hub.hub import ModelSource, read_model_source, stored_shapes


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A model specification with what a user should know about its source."""

    spec: ModelSpec
    config: dict[str, Any]
    """The validated `config.json`, from which activations are traced when none are stored."""
    notes: tuple[str, ...]
    """Remarks about the source, such as a quantized checkpoint."""


def load_model_spec(model: str, *, revision: str | None = None, by_structure: bool = False) -> LoadedModel:
    """Return the specification of a Hub id, local directory or `config.json`; torch loads only for rarer families.

    `by_structure` counts a decoder that needs code of its own by its files, where it is else refused.

    Raises:
        UsageError: nothing of that name exists.
        RefusedInputError: the configuration or a safetensors header is corrupt, absurd or needs foreign code.
        ShardwrightError: the Hub cannot be reached or denies access.
    """
    return model_from_source(read_model_source(model, revision=revision), by_structure=by_structure)


def model_from_source(source: ModelSource, *, by_structure: bool = False) -> LoadedModel:
    """Return the specification of a configuration that was read; raises as `load_model_spec` does."""
    spec = model_spec_from_config(source.config, name=source.name, revision=source.revision)
    spec = spec or model_spec_from_shapes(source.config, name=source.name, revision=source.revision)
    notes: list[str] = []
    if spec is None and by_structure and "auto_map" in source.config:
        spec = _spec_from_files(source, notes)
    if spec is None:
        from ..transformers.meta_model import model_spec_from_meta

        spec = model_spec_from_meta(source.config, name=source.name, revision=source.revision)
    spec = replace(
        spec,
        layer_types=_layer_types(source.config),
        attention=_attention(source.config) or spec.attention,
        rope_type=_rope_type(source.config),
    )
    named = (source.config.get("architectures") or [spec.architecture])[0]
    if named != spec.architecture:
        notes.append(
            f"architectures = {named!r} is no class of the installed transformers: taken as {spec.architecture}"
        )
    method = (source.config.get("quantization_config") or {}).get("quant_method")
    if method is not None:
        notes.append(f"the checkpoint is quantized ({method}); the plan counts its weights in training precision")
    stored = source.checkpoint_parameters
    if method is None and stored is not None and not _counts_agree(spec, stored):
        notes.append(f"the checkpoint holds {stored:,} parameters, {spec.architecture} has {spec.parameter_count:,}")
    return LoadedModel(spec=spec, config=source.config, notes=tuple(notes))


def _spec_from_files(source: ModelSource, notes: list[str]) -> ModelSpec | None:
    """Return the specification of a model that transformers does not know by its files, and note that it is one."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if source.config["model_type"] in CONFIG_MAPPING_NAMES:
        return None
    quantized = bool(source.config.get("quantization_config"))
    shapes = None if quantized else stored_shapes(source)
    spec = model_spec_from_structure(source.config, name=source.name, revision=source.revision, shapes=shapes)
    if spec is not None:
        what = "the shapes of its checkpoint" if shapes else "its sizes, counted as a decoder of Llama's kind"
        notes.append(f"{spec.architecture} is code of its repository, which is not run: planned from {what}")
    return spec


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
