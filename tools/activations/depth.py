"""Finds and changes the depth of every layer stack in a `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DEPTH_KEYS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "num_decoder_layers",
    "encoder_layers",
    "decoder_layers",
)
SUB_CONFIGS = ("text_config", "vision_config", "audio_config", "encoder", "decoder")
# Per-layer choices that would make layers differ in kind between a shallow and a deep model.
UNIFORM = {"mlp_only_layers": [], "first_k_dense_replace": 0, "max_window_layers": 0}
# CPU attention leaves its fused kernel when dropout is on; the CUDA kernel keeps no mask for it.
ATTENTION_DROPOUTS = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop")


def stack_depths(config: Mapping[str, Any], depth: int | None = None) -> dict[str, int]:
    """Returns the depth of each stack by its dotted config key, or `depth` for all of them.

    Defaults of the config class count: a `config.json` may leave its depth out.
    """
    found = _depths(_with_defaults(config), "")
    if not found:
        raise ValueError(f"config of model_type {config.get('model_type')!r} states no number of layers")
    return {name: depth or value for name, value in found.items()}


def _with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    from transformers import AutoConfig

    full: dict[str, Any] = AutoConfig.for_model(**_copy(config)).to_dict()
    return full


def _depths(config: Mapping[str, Any], prefix: str) -> dict[str, int]:
    own = {f"{prefix}{key}": config[key] for key in DEPTH_KEYS if isinstance(config.get(key), int)}
    # BART-like configs repeat the encoder's depth, T5-like ones the layers, under a second name.
    if f"{prefix}encoder_layers" in own or f"{prefix}num_layers" in own:
        own.pop(f"{prefix}num_hidden_layers", None)
    for name in SUB_CONFIGS:
        if isinstance(config.get(name), Mapping):
            own |= _depths(config[name], f"{prefix}{name}.")
    return own


def at_depth(config: Mapping[str, Any], depths: Mapping[str, int]) -> dict[str, Any]:
    """Returns the config with the given depths and layers of one kind."""
    changed, defaults = _copy(config), _with_defaults(config)
    for path, depth in depths.items():
        *parents, key = path.split(".")
        place = changed
        for parent in parents:
            place = place.setdefault(parent, {})
        place[key] = depth
        if isinstance(place.get("layer_types"), list):
            place["layer_types"] = place["layer_types"][:depth]
    changed |= {name: value for name, value in UNIFORM.items() if name in defaults}
    return changed


def _copy(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _copy(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in {"auto_map", "num_hidden_layers" if "encoder_layers" in config else ""}
    }
