"""Load the `ModelSpec` of a model: from a closed form if there is one, else from the meta device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from ...ds_configs.models.families import model_spec_from_config
from ...ds_configs.models.stored_shapes import model_spec_from_shapes, model_type_of
from ...ds_configs.plan.gallery import packaged_model, packaged_models
from ...ds_configs.specs.errors import ConfigError, RefusedInputError, ShardwrightError, UsageError
from ...ds_configs.specs.model import ModelSpec
from ..huggingface_hub import ModelSource, read_model_source
from ..releases import installed_version, transformers_release


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A model specification with notes about its source."""

    spec: ModelSpec
    config: dict[str, Any]
    """The validated `config.json`."""
    notes: tuple[str, ...]
    """Warnings about the source, such as a quantized checkpoint."""


def load_model_spec(
    model: str, *, revision: str | None = None, by_structure: bool = False, packaged: bool = False
) -> LoadedModel:
    """Return the specification of a Hub id, local directory or `config.json`; torch loads only for rarer families.

    With `by_structure`, a model type of remote code whose class Transformers has is planned as the type of that class.
    With `packaged`, a public model of the package is described by the package if the Hub cannot be reached or denies
    access.

    Raises:
        UsageError: The model does not exist.
        RefusedInputError: The configuration or a safetensors header is corrupt, absurd or requires remote code.
        ShardwrightError: The Hub cannot be reached or denies access.
    """
    try:
        source = read_model_source(model, revision=revision)
    except RefusedInputError:
        raise
    except UsageError as error:
        near = _nearest_gallery_model(model) if packaged else None
        if near is None or any(listed.where != "model" for listed in error.errors):
            raise
        raise UsageError([replace(listed, fix=f"did you mean {near}?") for listed in error.errors]) from None
    except ShardwrightError as error:
        if not packaged or revision is not None or model not in packaged_models():
            near = _nearest_gallery_model(model) if packaged else None
            if near is None:
                raise
            choice = f"plan {near}" if near != model else "omit --revision"
            message = f"{error}, or {choice}: its configuration is in this package"
            raise ShardwrightError(message) from None
        reason = str(error).removeprefix(f"model = {model!r}: ").partition("; ")[0]
        note = f"{model} is planned from its configuration in this package, without a commit of the Hub: {reason}"
        spec = packaged_model(model, release=transformers_release())
        return LoadedModel(spec=spec, config={}, notes=(note,))
    return model_from_source(source, by_structure=by_structure)


def _nearest_gallery_model(name: str) -> str | None:
    """Return the model of the package with nearly this name, whatever its organization and case; none for a path."""
    if name.startswith((".", "/", "~")) or name.endswith(".json"):
        return None
    known = {known.rpartition("/")[2].lower(): known for known in packaged_models()}
    near = get_close_matches(name.rpartition("/")[2].lower(), known, n=1, cutoff=0.85)
    return known[near[0]] if near else None


def _family_of_class(config: dict[str, Any], release: str) -> str | None:
    """Return the model type of the class in `architectures` if it differs from `model_type`, which names remote code.

    Without remote code, `model_type` decides, as in the Auto classes of Transformers, which reject an unknown one.
    """
    architecture = next(iter(config.get("architectures") or ()), None)
    if architecture is None or "model_type" not in config or "auto_map" not in config:
        return None
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    is_known = config["model_type"] in CONFIG_MAPPING_NAMES
    if (stored := model_type_of(architecture, release=release)) is not None or is_known:
        return stored if stored != config["model_type"] else None
    import transformers

    # The lazy module knows the package of each class without importing it.
    module = getattr(transformers, "_class_to_module", {}).get(architecture, "")
    name = module.split(".")[1] if module.startswith("models.") else ""
    return next((kind for kind in (name, name.replace("_", "-")) if kind in CONFIG_MAPPING_NAMES), None)


def model_from_source(source: ModelSource, *, by_structure: bool = False) -> LoadedModel:
    """Return the specification of a configuration; raises the errors of `load_model_spec`."""
    release, config = transformers_release(), source.config
    identity: dict[str, Any] = {"name": source.name, "revision": source.revision}
    spec = model_spec_from_config(config, **identity, release=release)
    spec = spec or model_spec_from_shapes(config, **identity, release=release)
    notes: list[str] = []
    family = _family_of_class(config, release) if spec is None and by_structure else None
    if family is not None:
        own, architecture = config["model_type"], config["architectures"][0]
        notes.append(
            f"model_type = {own!r} is not that of {architecture}: planned as {family!r}, the type of this class"
        )
        config = config | {"model_type": family}
        spec = model_spec_from_config(config, **identity, release=release)
        spec = spec or model_spec_from_shapes(config, **identity, release=release)
    if installed_version("transformers") is None:
        notes.append(f"transformers is not installed; the plan is for {release}, the newest tested release")
    if spec is None:
        from ..transformers.meta_model import model_spec_from_meta

        spec = model_spec_from_meta(config, **identity)
    if family is not None:
        # Its own code decides about layers and the layouts that they support.
        spec = replace(spec, layer_classes=(), weight_conversion=False, source="structure")
    # Reject SDPA for a class without it, as Transformers does when it builds the model.
    if _attention(config) == "sdpa" and spec.attention == "eager":
        rule = f"is not supported: {spec.architecture} of transformers {spec.release} has no SDPA"
        where, fix = f"{spec.name}: attn_implementation", "remove it, or write eager"
        raise RefusedInputError(ConfigError(where=where, value="sdpa", rule=rule, fix=fix))
    layer_types = config.get("layer_types")
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    rope_type = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else None
    spec = replace(
        spec,
        layer_types=tuple(sorted({str(kind) for kind in layer_types})) if isinstance(layer_types, list) else (),
        attention=_attention(config) or spec.attention,
        rope_type=rope_type if isinstance(rope_type, str) and rope_type != "default" else "",
    )
    architecture = (config.get("architectures") or [spec.architecture])[0]
    usual = model_type_of(architecture, release=release)
    if usual is not None and usual.partition("_")[0] != str(config["model_type"]).partition("_")[0]:
        notes.append(
            f"architectures = {architecture!r} is a class of {usual!r}, but model_type is {config['model_type']!r}: "
            f"planned as {spec.architecture}; Auto classes of transformers load the class of the model_type"
        )
    if architecture != spec.architecture:
        notes.append(
            f"architectures = {architecture!r} is not a class of the installed transformers; the plan is for "
            f"{spec.architecture}"
        )
    method = (config.get("quantization_config") or {}).get("quant_method")
    if method is not None:
        notes.append(f"the checkpoint is quantized ({method}); the plan counts its weights in training precision")
    stored = source.checkpoint_parameters
    # Checkpoints may have a tied head twice and old rotary tables, so 0.25 % is tolerated.
    tied_head = spec.embedding_parameters if spec.tied_embeddings else 0
    counts = (spec.parameter_count, spec.parameter_count + tied_head)
    if method is None and stored is not None and all(abs(stored - count) > count / 400 for count in counts):
        notes.append(f"the checkpoint has {stored:,} parameters, but {spec.architecture} has {spec.parameter_count:,}")
    return LoadedModel(spec=spec, config=config, notes=tuple(notes))


def _attention(config: dict[str, Any]) -> str | None:
    attention = config.get("attn_implementation", config.get("_attn_implementation"))
    return attention if isinstance(attention, str) else None
