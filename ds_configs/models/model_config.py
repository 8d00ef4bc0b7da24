"""Validation of a `config.json` before anything is computed or allocated from it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ..specs.errors import Fault, RefusedInputError
from .families import CONFIG_FIELDS, FAST_FAMILIES

LARGEST_CONFIG_BYTES = 4 * 2**20
"""A `config.json` beyond this size is not one (the largest public ones hold some hundred kB of label maps)."""

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
_ZERO_MEANS_NONE = ("num_experts", "num_local_experts", "moe_intermediate_size")
_REPEATED = re.compile(r"(layers?|depths?|blocks|stages|experts)$")
"""Endings of the fields that transformers builds modules in a loop for, in any family."""
# Transformers builds a module for each: a config from elsewhere that asks for a billion would fill the memory.
_MOST_REPEATS = 10_000
_MOST_BUILT_LAYERS = 1_000
"""Layers of a family that is counted on the meta device, in milliseconds for each: eight times Llama 405B's."""
_COUNTS = re.compile(r"(layers|depths|blocks|stages|experts|_replace)$")
"""Endings of the fields that count modules: never negative, where `..._layer` may count from the end."""
LAYER_INDICES = ("mlp_only_layers", "moe_layers", "attn_layer_indices", "cross_attention_layers", "hybrid_layer_ids")
"""Fields that list layers by number."""
_LAYER_KINDS = ("layer_types", "layers_block_type", "attention_layers")
_SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "add_cross_attention")


def parse_config_json(text: str | bytes, *, source: str) -> dict[str, Any]:
    """Parse and validate a `config.json`.

    Raises:
        RefusedInputError: it is not a JSON object, has no `model_type`, or a size is missing or absurd.
    """
    if len(text) > LARGEST_CONFIG_BYTES:
        raise RefusedInputError(
            Fault(where=source, value=len(text), rule=f"a config.json has at most {LARGEST_CONFIG_BYTES} bytes")
        )
    try:
        config = json.loads(text, parse_constant=_number)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise RefusedInputError(
            Fault(where=source, rule=f"is not valid JSON ({error})", fix="give the config.json of a model")
        ) from None
    if not isinstance(config, dict):
        raise RefusedInputError(Fault(where=source, value=type(config).__name__, rule="must be a JSON object"))
    faults = config_faults(config, source=source)
    if faults:
        raise RefusedInputError(faults)
    return config


def _number(text: str) -> float:
    """Return a constant that JSON does not have: infinity bounds the time steps of Mamba-2, NaN means nothing."""
    if text == "NaN":
        raise ValueError("a number is NaN")
    return float(text)


def config_faults(config: Mapping[str, Any], *, source: str) -> list[Fault]:
    """Return every violated rule of a model config, nested text and vision configs included."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type.replace("_", "").replace("-", "").isalnum():
        if "peft_type" in config or "base_model_name_or_path" in config:
            fix = "this is an adapter; give the base model it was trained on"
        else:
            fix = "give the config.json of a model that transformers can build"
        return [Fault(where=f"{source}: model_type", value=model_type, rule="must name a model type", fix=fix)]
    names = CONFIG_FIELDS.get(model_type, {})
    faults = _kind_faults(config, source)
    if model_type in FAST_FAMILIES:
        required = (*_REQUIRED, *(() if model_type == "gpt2" else ("intermediate_size",)))
        faults += [
            Fault(where=f"{source}: {names.get(field, field)}", rule="is missing", fix="write the model's size")
            for field in required
            if config.get(names.get(field, field)) is None
        ]
    faults += _size_faults(config, names, source, one_per_layer=model_type not in FAST_FAMILIES)
    faults += _layer_faults(config, names, source)
    faults += _divisibility_faults(config, names, source)
    for nested, value in config.items():
        if nested.endswith("_config") and isinstance(value, dict) and nested != "quantization_config":
            faults += _size_faults(value, {}, f"{source}: {nested}", one_per_layer=True)
            faults += _layer_faults(value, {}, f"{source}: {nested}")
            faults += _divisibility_faults(value, {}, f"{source}: {nested}")
    return faults


def code_faults(config: Mapping[str, Any], source: str) -> list[Fault]:
    """Return the fields that would load a kernel of the Hub, which is code: transformers 5.17.0 asks for no consent.

    Loading a model runs it; planning builds the model without these fields.
    """
    rule, fix = "names a kernel of the Hub, which would run its code", "remove it, or name sdpa or eager"
    faults = []
    for name, value in config.items():
        if isinstance(value, dict) and name.endswith("_config"):
            faults += code_faults(value, f"{source}: {name}")
        elif name.removesuffix("_internal").endswith(("attn_implementation", "experts_implementation")):
            named = value.values() if isinstance(value, dict) else [value]
            if any("/" in str(each) for each in named):
                faults.append(Fault(where=f"{source}: {name}", value=value, rule=rule, fix=fix))
    return faults


def _kind_faults(config: Mapping[str, Any], source: str) -> list[Fault]:
    """Return the fields that are read by name and hold a value of another kind."""

    def fault(field: str, rule: str) -> Fault:
        return Fault(where=f"{source}: {field}", value=config[field], rule=rule)

    faults = []
    classes = config.get("architectures")
    if classes is not None and not (isinstance(classes, list) and all(isinstance(name, str) for name in classes)):
        faults.append(fault("architectures", "must be a list of class names"))
    quantization = config.get("quantization_config")
    if quantization is not None and not isinstance(quantization, dict):
        faults.append(fault("quantization_config", "must be a JSON object"))
    faults += [
        fault(field, "must be true or false")
        for field in _SWITCHES
        if config.get(field) is not None and not isinstance(config[field], bool)
    ]
    window = config.get("sliding_window")
    if window is not None and not isinstance(window, list) and not _is_size(window, _LIMITS["max_position_embeddings"]):
        faults.append(fault("sliding_window", "must be a positive integer or null"))
    rotary = config.get("partial_rotary_factor")
    if rotary is not None and (isinstance(rotary, bool) or not isinstance(rotary, int | float) or not 0 < rotary <= 1):
        faults.append(fault("partial_rotary_factor", "must be a number above 0 and at most 1"))
    return faults


def _size_faults(
    config: Mapping[str, Any], names: Mapping[str, str], source: str, *, one_per_layer: bool
) -> list[Fault]:
    """Return the sizes that are no sizes; `one_per_layer` allows a list with the size of each layer or stage."""
    faults = [
        Fault(where=f"{source}: {name}", value=value, rule=f"is beyond {_most(name):,}, which no model repeats")
        for name, value in config.items()
        if name not in _LIMITS and _REPEATED.search(name) and _largest(value) > _most(name)
    ]
    limits = _LIMITS | ({"num_hidden_layers": _MOST_BUILT_LAYERS} if one_per_layer else {})
    for field, limit in limits.items():
        name = names.get(field, field)
        if name not in config:
            continue
        value = config[name]
        if value is None:
            continue
        if one_per_layer and isinstance(value, list) and value and all(_is_size(item, limit) for item in value):
            continue
        zero_allowed = value == 0 and field in _ZERO_MEANS_NONE and not isinstance(value, bool)
        if not _is_size(value, limit) and not zero_allowed:
            faults.append(Fault(where=f"{source}: {name}", value=value, rule=f"must be an integer from 1 to {limit:,}"))
    return faults


def _layer_faults(config: Mapping[str, Any], names: Mapping[str, str], source: str) -> list[Fault]:
    """Return the counts, indices and kinds of layers that are none, which Transformers takes without a word."""
    faults = [
        Fault(where=f"{source}: {name}", value=value, rule="cannot be negative")
        for name, value in config.items()
        if isinstance(value, int) and value < 0 and name not in _LIMITS and _COUNTS.search(str(name))
    ]
    layers = config.get(names.get("num_hidden_layers", "num_hidden_layers"))
    for name in LAYER_INDICES:
        indices = config.get(name)
        if isinstance(indices, list) and isinstance(layers, int):
            outside = [index for index in indices if not isinstance(index, int) or not 0 <= index < layers]
            if outside:
                rule = f"must hold layers from 0 to {layers - 1}"
                faults.append(Fault(where=f"{source}: {name}", value=outside[:3], rule=rule))
    for name in _LAYER_KINDS:
        kinds = config.get(name)
        if isinstance(kinds, list) and not all(isinstance(kind, str) for kind in kinds):
            faults.append(Fault(where=f"{source}: {name}", value=kinds[:3], rule="must be a list of names"))
    return faults


def _most(name: str) -> int:
    """Return how often a field may repeat modules; those of layers hold several each."""
    return _MOST_REPEATS if name.endswith("experts") else _MOST_BUILT_LAYERS


def _largest(value: object) -> int:
    items = value if isinstance(value, list) else [value]
    return max((item for item in items if isinstance(item, int)), default=0)


def _is_size(value: object, limit: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= limit


def _divisibility_faults(config: Mapping[str, Any], names: Mapping[str, str], source: str) -> list[Fault]:
    faults = []
    heads = config.get(names.get("num_attention_heads", "num_attention_heads"))
    key_value_heads = config.get("num_key_value_heads")
    hidden = config.get(names.get("hidden_size", "hidden_size"))
    if not isinstance(heads, int) or heads < 1:
        return []
    if isinstance(key_value_heads, int) and key_value_heads > 0 and heads % key_value_heads:
        divisors = [n for n in range(1, heads + 1) if heads % n == 0]
        nearest = sorted(divisors, key=lambda n: abs(n - key_value_heads))[:2]
        faults.append(
            Fault(
                where=f"{source}: num_key_value_heads",
                value=key_value_heads,
                rule=f"must divide num_attention_heads ({heads} % {key_value_heads} = {heads % key_value_heads})",
                fix=f"nearest legal values: {', '.join(map(str, sorted(nearest)))}",
            )
        )
    if isinstance(hidden, int) and config.get("head_dim") is None and hidden % heads:
        faults.append(
            Fault(
                where=f"{source}: hidden_size",
                value=hidden,
                rule=f"must be divisible by num_attention_heads ({hidden} % {heads} = {hidden % heads})",
                fix="write head_dim when heads do not tile the hidden size",
            )
        )
    experts = config.get("num_local_experts", config.get("num_experts"))
    per_token = config.get("num_experts_per_tok")
    if isinstance(experts, int) and isinstance(per_token, int) and 0 < experts < per_token:
        faults.append(
            Fault(
                where=f"{source}: num_experts_per_tok",
                value=per_token,
                rule=f"cannot exceed the {experts} experts of a layer",
            )
        )
    return faults
