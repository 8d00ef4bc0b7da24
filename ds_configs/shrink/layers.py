"""Layers of a stack that a rehearsal keeps: few, every kind of them, and in the phase that the pattern has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from math import ceil, lcm
from typing import Any

from ..models.model_config import LAYER_INDICES
from ..specs.changes import Rewriting, is_count

LAYER_COUNTS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "encoder_layers",
    "decoder_layers",
    "num_decoder_layers",
)
"""Names of the number of layers, the main stack's first."""

# Jamba's, the longest of the known patterns: one attention layer in 8.
_LONGEST_PERIOD = 8
# As in `models/model_config.py`: a count from a stranger's file is never expanded unbounded.
_MOST_REPEATS = 10_000
_PERIODIC_LISTS = ("layer_types", "no_rope_layers", "layers_block_type", "attention_layers")
_DENSE_PREFIXES = ("first_k_dense_replace", "moe_layer_start_index")
_PERIODS = (
    "decoder_sparse_step",
    "moe_layer_freq",
    "moe_layer_interval",
    "interleave_moe_layer_step",
    "attn_layer_period",
    "expert_layer_period",
)
_ATTENTION_PERIODS = (
    "sliding_window_pattern",
    "full_attention_interval",
    "no_rope_layer_interval",
    "global_attn_every_n_layers",
)
_IMPLIED_PERIODS: Mapping[str, int] = {
    "afmoe": 4,
    "cohere2": 4,
    "cwm": 4,
    "exaone4": 4,
    "gemma2": 2,
    "gemma3_text": 6,
    "gemma3n_text": 5,
    "gemma4_text": 6,
    "gpt_oss": 2,
    "llama4_text": 4,
    "modernbert": 3,
    "modernbert-decoder": 3,
    "qwen3_next": 4,
    "smollm3": 4,
}
"""Layers after which attention kinds repeat when the config says nothing (transformers/models/*/configuration_*.py)."""
_NOT_PER_LAYER = re.compile(r"token_(ids?|index)$|architectures$|_indexes$|_grid_pinpoints$")


def cut_layers(config: Rewriting, *, layers: int, pipeline_stages: int) -> None:
    """Keep about `layers` layers, in a multiple of `pipeline_stages`, with all fields that count or list layers."""
    total = layer_count(config.values)
    if total is None or (total <= layers and total % pipeline_stages == 0):
        return
    kept = kept_layers(config.values, layers=layers, pipeline_stages=pipeline_stages)
    for name, values in list(_per_layer_lists(config.values, total)):
        config.put(name, [values[index] for index in kept])
    for name in LAYER_INDICES:
        if isinstance(config.get(name), list):
            config.put(name, [new for new, old in enumerate(kept) if old in config.get(name)])
    # Thresholds count the layers before them; the last layer's index is one of the kept ones.
    for name in (*_DENSE_PREFIXES, "max_window_layers"):
        if is_count(config.get(name)):
            config.put(name, sum(index < config.get(name) for index in kept))
    if is_count(config.get("moe_layer_end_index")):
        config.put("moe_layer_end_index", max(0, sum(i <= config.get("moe_layer_end_index") for i in kept) - 1))
    if is_count(config.get("num_kv_shared_layers")):
        config.put("num_kv_shared_layers", max(1, config.get("num_kv_shared_layers") * len(kept) // total))
    for name in LAYER_COUNTS:
        if is_count(config.get(name)):
            config.put(name, min(config.get(name), len(kept)))
    overrides = _overrides(config.values)
    if overrides:
        width = max(len(str(key)) for key in config.get("per_layer_config"))
        moved = {str(new).zfill(width): overrides[old] for new, old in enumerate(kept) if old in overrides}
        config.put("per_layer_config", moved)
    patterns = _expanded(config.get("attention_types"))
    if len(patterns) == total:
        config.put("attention_types", [[[patterns[index] for index in kept], 1]])


def layer_count(config: Mapping[str, Any]) -> int | None:
    """Return the number of layers of a config, or `None` when it states none."""
    return next((config[name] for name in LAYER_COUNTS if is_count(config.get(name))), None)


def kept_layers(config: Mapping[str, Any], *, layers: int, pipeline_stages: int) -> list[int]:
    """Return the indices of the layers to keep, ascending.

    Layers are kept in whole blocks of the period of their pattern, so that each stays where the pattern expects it:
    first the blocks that bring a new kind of layer, then the last ones.
    """
    total = layer_count(config)
    assert total is not None, "a stack has a number of layers"
    kinds = _kinds(config, total)
    computed = _computed_period(config)
    listed = lcm(computed, *(_period(config[name]) for name in _PERIODIC_LISTS if isinstance(config.get(name), list)))
    sizes = [size for size in (listed, computed, 1) if lcm(size, pipeline_stages) <= total]
    if not sizes:
        return list(range(total))
    block = sizes[0]
    blocks = [range(start, start + block) for start in range(0, total - block + 1, block)]
    chosen: list[int] = []
    covered: set[str] = set()
    for index, members in enumerate(blocks):
        if not covered.issuperset(kinds[layer] for layer in members):
            chosen.append(index)
            covered.update(kinds[layer] for layer in members)
    least = 2 if is_count(config.get("num_kv_shared_layers")) else 1
    unit = lcm(block, pipeline_stages) // block
    wanted = ceil(max(len(chosen), least, ceil(layers / block)) / unit) * unit
    wanted = min(wanted, len(blocks) // unit * unit)
    spare = [index for index in reversed(range(len(blocks))) if index not in chosen]
    chosen = sorted(chosen[:wanted] + spare[: max(0, wanted - len(chosen))])
    return [layer for index in chosen for layer in blocks[index]]


def _kinds(config: Mapping[str, Any], total: int) -> list[str]:
    """Return what distinguishes each layer, as text."""
    columns: list[list[Any]] = [values for _, values in _per_layer_lists(config, total)]
    columns += [
        [index in config[name] for index in range(total)]
        for name in LAYER_INDICES
        if isinstance(config.get(name), list)
    ]
    thresholds = [*_DENSE_PREFIXES, *(["max_window_layers"] if config.get("use_sliding_window") else [])]
    columns += [[index < config[name] for index in range(total)] for name in thresholds if is_count(config.get(name))]
    overrides = _overrides(config)
    columns.append([overrides.get(index) for index in range(total)])
    patterns = _expanded(config.get("attention_types"))
    if len(patterns) == total:
        columns.append(patterns)
    return [json.dumps([column[index] for column in columns], default=str) for index in range(total)]


def _per_layer_lists(config: Mapping[str, Any], total: int) -> Iterator[tuple[str, list[Any]]]:
    """Yield every list with one entry for each layer (`no_rope_layers` may hold more)."""
    for name, value in config.items():
        if not isinstance(value, list) or name in LAYER_INDICES or _NOT_PER_LAYER.search(name):
            continue
        if len(value) == total or (name == "no_rope_layers" and len(value) > total):
            yield name, value[:total]


def _computed_period(config: Mapping[str, Any]) -> int:
    """Return the layers after which what transformers computes from a layer's index repeats."""
    periods = [config[name] for name in _PERIODS if is_count(config.get(name))]
    if not any(isinstance(config.get(name), list) for name in _PERIODIC_LISTS):
        stated = [config[name] for name in _ATTENTION_PERIODS if is_count(config.get(name))]
        periods += stated or [_IMPLIED_PERIODS.get(str(config.get("model_type")), 1)]
    return lcm(*periods)


def _period(values: list[Any]) -> int:
    """Return the length of the pattern that a list repeats; 1 when it is none of the usual short ones."""
    for period in range(1, min(_LONGEST_PERIOD, len(values)) + 1):
        if all(value == values[index % period] for index, value in enumerate(values)):
            return period
    return 1


def _overrides(config: Mapping[str, Any]) -> dict[int, Any]:
    """Return what single layers override, by layer index."""
    stated = config.get("per_layer_config")
    return {int(key): stated[key] for key in stated if str(key).isdecimal()} if isinstance(stated, dict) else {}


def _expanded(attention_types: object) -> list[Any]:
    """Return the attention of each layer from pairs of a pattern and how often it repeats (GPT-Neo)."""
    kinds: list[Any] = []
    for pair in attention_types if isinstance(attention_types, list) else []:
        if isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], list) and is_count(pair[1]):
            kinds += pair[0] * min(pair[1], _MOST_REPEATS)
    return kinds
