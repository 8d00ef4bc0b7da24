"""Parse and validate `config.json`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ..specs.errors import ConfigError, RefusedInputError
from ..specs.model import Group, ModelConfig, ParameterKind

LARGEST_CONFIG_BYTES = 4 * 2**20
"""Largest size of a `config.json`; the largest public ones have some hundred kB of label maps."""

_LIMITS: dict[str, int] = {
    "num_hidden_layers": 10_000,
    "hidden_size": 1_000_000,
    "intermediate_size": 10_000_000,
    "num_attention_heads": 10_000,
    "num_key_value_heads": 10_000,
    "head_dim": 100_000,
    "vocab_size": 100_000_000,
    "num_experts": 100_000,
    "num_local_experts": 100_000,
    "num_experts_per_tok": 100_000,
    "moe_intermediate_size": 10_000_000,
    "max_position_embeddings": 1_000_000_000,
}
_REQUIRED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
SIZED_FAMILIES = (
    *("gemma2", "gemma3_text", "gpt2", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3", "qwen3_moe"),
)
"""Model types whose files must have these sizes, for which Transformers has the defaults of one model."""
_GPT2_FIELDS = {
    "num_hidden_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
}
"""Names of the standard fields in files of GPT-2."""
_ZERO_MEANS_NONE = ("num_experts", "num_local_experts", "moe_intermediate_size")
_REPEATED = re.compile(r"(layers?|depths?|blocks|stages|experts)$")
"""Endings of fields that count modules, which Transformers builds in a loop."""
# Transformers builds each module: an untrusted config with a billion layers would fill the memory.
_MOST_REPEATS = 10_000
_MOST_BUILT_LAYERS = 1_000
"""Most layers of a model on the meta device, where each takes milliseconds: eight times those of Llama 405B."""
_COUNTS = re.compile(r"(layers|depths|blocks|stages|experts|_replace)$")
"""Endings of fields that must not be negative; fields that end in `_layer` may count from the end."""
LAYER_INDICES = ("mlp_only_layers", "moe_layers", "attn_layer_indices", "cross_attention_layers", "hybrid_layer_ids")
"""Fields that list layer indices."""
_LAYER_KINDS = ("layer_types", "layers_block_type", "attention_layers")
_SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "add_cross_attention")


def parse_config_json(text: str | bytes, *, source: str) -> dict[str, Any]:
    """Parse and validate a `config.json`.

    Raises:
        RefusedInputError: The text is not a JSON object, has no `model_type`, or a size is missing or absurd.
    """
    if len(text) > LARGEST_CONFIG_BYTES:
        rule, fix = f"must be at most {LARGEST_CONFIG_BYTES} bytes", "pass the config.json of a model"
        raise RefusedInputError(ConfigError(where=source, value=len(text), rule=rule, fix=fix))

    def number(name: str) -> float:
        """Return infinity, which limits the time steps of Mamba-2 although JSON does not have it; NaN is an error."""
        if name == "NaN":
            raise ValueError("a number is NaN")
        return float(name)

    try:
        config = json.loads(text, parse_constant=number)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        rule, fix = f"is not valid JSON ({error})", "pass the config.json of a model"
        start = error.doc[error.pos :].lstrip() if isinstance(error, json.JSONDecodeError) else ""
        if start.startswith(("//", "/*", "#")):
            fix = "remove the comment: JSON has none"
        raise RefusedInputError(ConfigError(where=source, rule=rule, fix=fix)) from None
    if not isinstance(config, dict):
        rule, fix = "must be a JSON object", "pass the config.json of a model"
        raise RefusedInputError(ConfigError(where=source, value=type(config).__name__, rule=rule, fix=fix))
    errors = config_errors(config, source=source)
    if errors:
        raise RefusedInputError(errors)
    return config


def config_errors(config: ModelConfig, *, source: str) -> list[ConfigError]:
    """Return the errors of a model config, including its nested text and vision configs."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type.replace("_", "").replace("-", "").isalnum():
        is_adapter = "peft_type" in config or "base_model_name_or_path" in config
        fix = "this is an adapter: pass its base model"
        fix = fix if is_adapter else "pass the config.json of a model that transformers supports"
        rule = "must be the name of a model type"
        return [ConfigError(where=f"{source}: model_type", value=model_type, rule=rule, fix=fix)]
    names = _GPT2_FIELDS if model_type == "gpt2" else {}
    errors, is_sized = _kind_errors(config, source), model_type in SIZED_FAMILIES
    for field in (*_REQUIRED, *(() if model_type == "gpt2" else ("intermediate_size",))) if is_sized else ():
        name = names.get(field, field)
        if config.get(name) is None:
            errors.append(ConfigError(where=f"{source}: {name}", rule="is missing", fix="add the size of the model"))
    errors += _part_errors(config, names, source, one_per_layer=not is_sized)
    for nested, value in config.items():
        if nested.endswith("_config") and isinstance(value, dict) and nested != "quantization_config":
            errors += _part_errors(value, {}, f"{source}: {nested}", one_per_layer=True)
    return errors


def code_errors(config: ModelConfig, source: str) -> list[ConfigError]:
    """Return the errors of fields that load a kernel from the Hub, whose code transformers 5.17.0 runs without asking.

    Loading a model runs that code; planning builds the model without these fields.
    """
    rule, fix = "must not be a kernel of the Hub, whose code would run", "remove it, or write sdpa or eager"
    errors = []
    for name, value in config.items():
        if isinstance(value, dict) and name.endswith("_config"):
            errors += code_errors(value, f"{source}: {name}")
        elif name.removesuffix("_internal").endswith(("attn_implementation", "experts_implementation")):
            names = value.values() if isinstance(value, dict) else [value]
            if any("/" in str(kernel) for kernel in names):
                errors.append(ConfigError(where=f"{source}: {name}", value=value, rule=rule, fix=fix))
    return errors


def _kind_errors(config: ModelConfig, source: str) -> list[ConfigError]:
    """Return the errors of fields whose values have a wrong type."""

    def error(field: str, rule: str) -> ConfigError:
        return ConfigError(where=f"{source}: {field}", value=config[field], rule=rule)

    errors = []
    classes = config.get("architectures")
    if classes is not None and not (isinstance(classes, list) and all(isinstance(name, str) for name in classes)):
        errors.append(error("architectures", "must be a list of class names"))
    quantization = config.get("quantization_config")
    if quantization is not None and not isinstance(quantization, dict):
        errors.append(error("quantization_config", "must be a JSON object"))
    errors += [
        error(field, "must be true or false")
        for field in _SWITCHES
        if config.get(field) is not None and not isinstance(config[field], bool)
    ]
    window = config.get("sliding_window")
    if window is not None and not isinstance(window, list) and not _is_size(window, _LIMITS["max_position_embeddings"]):
        errors.append(error("sliding_window", "must be a positive integer or null"))
    rotary = config.get("partial_rotary_factor")
    if rotary is not None and (isinstance(rotary, bool) or not isinstance(rotary, int | float) or not 0 < rotary <= 1):
        errors.append(error("partial_rotary_factor", "must be a number above 0 and at most 1"))
    return errors


def _part_errors(
    config: ModelConfig, names: Mapping[str, str], source: str, *, one_per_layer: bool
) -> list[ConfigError]:
    """Return the errors of a configuration or of one of its parts: sizes, layers, and what must divide what.

    Transformers accepts wrong layer counts, indices and types silently. `one_per_layer` allows a list with the size of
    each layer or stage.
    """
    errors: list[ConfigError] = []

    def reject(name: str, rule: str, fix: str = "", *, value: object = None) -> None:
        shown = config.get(name) if value is None else value
        errors.append(ConfigError(where=f"{source}: {name}", value=shown, rule=rule, fix=fix))

    for name, value in config.items():
        if name not in _LIMITS and _REPEATED.search(name):
            # A layer has several modules.
            most = _MOST_REPEATS if name.endswith("experts") else _MOST_BUILT_LAYERS
            if any(isinstance(item, int) and item > most for item in (value if isinstance(value, list) else [value])):
                reject(name, f"must be at most {most:,}")
    limits = _LIMITS | ({"num_hidden_layers": _MOST_BUILT_LAYERS} if one_per_layer else {})
    for field, limit in limits.items():
        name = names.get(field, field)
        value = config.get(name)
        # A list has the size of each layer.
        sizes = value if one_per_layer and isinstance(value, list) and value else [value]
        zero_allowed = value == 0 and field in _ZERO_MEANS_NONE and not isinstance(value, bool)
        if value is not None and not zero_allowed and not all(_is_size(size, limit) for size in sizes):
            reject(name, f"must be an integer from 1 to {limit:,}")
    for name, value in config.items():
        if isinstance(value, int) and value < 0 and name not in _LIMITS and _COUNTS.search(str(name)):
            reject(name, "must not be negative")
    layers = config.get(names.get("num_hidden_layers", "num_hidden_layers"))
    for name in LAYER_INDICES:
        indices = config.get(name)
        if isinstance(indices, list) and isinstance(layers, int):
            outside = [index for index in indices if not isinstance(index, int) or not 0 <= index < layers]
            if outside:
                reject(name, f"must contain layers from 0 to {layers - 1}", value=outside[:3])
    for name in _LAYER_KINDS:
        kinds = config.get(name)
        if isinstance(kinds, list) and not all(isinstance(kind, str) for kind in kinds):
            reject(name, "must be a list of names", value=kinds[:3])
    heads = config.get(names.get("num_attention_heads", "num_attention_heads"))
    shared = config.get("num_key_value_heads")
    hidden = config.get(names.get("hidden_size", "hidden_size"))
    if not isinstance(heads, int) or heads < 1:
        return errors
    if isinstance(shared, int) and shared > 0 and heads % shared:
        divisors = [n for n in range(1, heads + 1) if heads % n == 0]
        near = sorted(sorted(divisors, key=lambda n: abs(n - shared))[:2])
        rule = f"must divide num_attention_heads ({heads} % {shared} = {heads % shared})"
        reject("num_key_value_heads", rule, f"nearest legal values: {', '.join(map(str, near))}")
    # Heads of latent attention have widths of their own.
    if isinstance(hidden, int) and not (config.get("head_dim") or config.get("qk_rope_head_dim")) and hidden % heads:
        rule = f"must be divisible by num_attention_heads ({hidden} % {heads} = {hidden % heads})"
        reject("hidden_size", rule, "add head_dim if the heads do not fill the hidden size", value=hidden)
    experts = config.get("num_local_experts", config.get("num_experts"))
    per_token = config.get("num_experts_per_tok")
    if isinstance(experts, int) and isinstance(per_token, int) and 0 < experts < per_token:
        reject("num_experts_per_tok", f"must be at most {experts}, the experts of a layer")
    return errors


def _is_size(value: object, limit: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= limit


LAYER_INDEX = re.compile(r"\.\d+\.")
"""The layer index in the name of a parameter."""


def parameter_group(name: str, kind: ParameterKind) -> Group:
    """Return the group of a parameter by its name; never `head`."""
    if kind in ("norm", "embedding", "experts"):
        return kind
    lowered = name.lower()
    if "attn" in lowered or "attention" in lowered:
        return "attention"
    mlp_names = ("mlp", "ffn", "feed_forward", "fc1", "fc2", "intermediate", "densereludense", ".output.")
    return "mlp" if any(part in lowered for part in mlp_names) else "other"
