"""Shrink a config.json, layout, ZeRO sizes and files to a few CPU ranks, and record every change.

The small model has the same classes, and the layout still divides it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from math import ceil, lcm, log2, prod
from typing import Any, TypeGuard

from .models.model_config import LAYER_INDICES, config_errors
from .specs.errors import ConfigError, RefusedInputError, UsageError
from .specs.layout import Layout, ZeroOptions
from .specs.model import ModelConfig, ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One changed value."""

    where: str
    """Key path of the value."""
    before: object
    """The original value; `None` if it was absent."""
    after: object
    """The new value; `None` if it was removed."""


def changes_between(before: ModelConfig, after: ModelConfig, path: str = "") -> tuple[Change, ...]:
    """Return the values that differ, with their key paths below `path`; an absent value equals null."""
    changes: list[Change] = []
    for name in {**before, **after}:
        old, new = before.get(name), after.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            changes += changes_between(old, new, f"{path}{name}.")
        elif old != new:
            changes.append(Change(where=path + name, before=old, after=new))
    return tuple(changes)


def counted(config: ModelConfig, names: Iterable[str]) -> list[str]:
    """Return those of the fields that are positive integers."""
    return [name for name in names if is_count(config.get(name))]


def section_of(config: dict[str, Any], name: str) -> dict[str, Any] | None:
    nested = config.get(name)
    return nested if isinstance(nested, dict) else None


def is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


HIDDEN_SIZES = ("hidden_size", "n_embd", "n_embed", "d_model", "dim")
"""Names of the width of the residual stream."""
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_HEAD_DIMS = ("head_dim", "d_kv", "kv_channels")
_ROTARY_FRACTIONS = ("partial_rotary_factor", "rotary_pct", "rotary_percent")
_LATENT_HEAD_DIMS = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_OTHER_HEAD_DIMS = ("global_head_dim", "index_head_dim", "linear_key_head_dim", "linear_value_head_dim")
_OTHER_HEADS = ("index_n_heads", "linear_num_key_heads", "linear_num_value_heads", "num_global_key_value_heads")
_PROPORTIONAL = re.compile(
    r"(intermediate_size|ffn_(dim|hidden_size)|(q|kv)_lora_rank)(_mlp)?$"
    r"|^(n_inner|d_ff|hidden_dim|hidden_size_per_layer_input|laurel_rank|word_embed_proj_dim|embedding_size)$"
)
"""Names of widths that shrink with the residual stream."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k")
_MOST_EXPERTS_PER_TOKEN = 4
_MOST_GROUPS = 4
_MULTIPLE = 16
_SMALLEST_HEAD_DIM = 8
_USUAL_HEADS = 8
_MOST_HEADS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """Width of the residual stream, and its attention heads."""

    hidden_size: int
    heads: int
    key_value_heads: int
    head_dim: int


def narrow(config: dict[str, Any], *, hidden_size: int, layout: Layout) -> tuple[Attention, Attention] | None:
    """Scale every width to a residual stream of about `hidden_size`; return attention before and after.

    `None` means that the config has no hidden size, or that the number of heads differs by layer.
    """
    hidden = next((config[name] for name in counted(config, HIDDEN_SIZES)), None)
    heads = next((config[name] for name in _HEADS if config.get(name) is not None), None)
    shared = next((config[name] for name in _KEY_VALUE_HEADS if config.get(name) is not None), heads)
    if hidden is None or not is_count(heads) or not is_count(shared):
        return None
    stated = [config[name] for name in ("v_head_dim", *_HEAD_DIMS) if is_count(config.get(name))]
    head_dim = stated[0] if stated else max(1, hidden // heads)
    before = Attention(hidden_size=hidden, heads=heads, key_value_heads=shared, head_dim=head_dim)
    if before.hidden_size <= hidden_size:
        return before, before
    rotary = _rotary_fraction(config, before)
    after = smaller_attention(before, hidden_size=hidden_size, rotary_fraction=rotary, layout=layout)
    ratio = after.hidden_size / before.hidden_size
    _put_heads(config, before, after)
    for name, value in config.items():
        if not _PROPORTIONAL.search(name):
            continue
        if isinstance(value, list):
            config[name] = [_in_proportion(v, before, ratio, layout) if is_count(v) else v for v in value]
        elif is_count(value):
            config[name] = _in_proportion(value, before, ratio, layout)
    # The heads of a state-space layer fill its inner width, `mamba_expand` times the hidden size.
    heads, head_dim, expand = (config.get(f"mamba_{name}") for name in ("n_heads", "d_head", "expand"))
    if is_count(heads) and is_count(head_dim) and is_count(expand):
        inner = expand * after.hidden_size
        legal = [n for n in range(1, min(heads, _USUAL_HEADS) + 1) if inner % n == 0 and inner // n <= head_dim]
        if legal and inner < heads * head_dim:
            config["mamba_n_heads"] = legal[-1]
            config["mamba_d_head"] = inner // legal[-1]
    for name in HIDDEN_SIZES:
        if config.get(name) == before.hidden_size:
            config[name] = after.hidden_size
    return before, after


def smaller_attention(before: Attention, *, hidden_size: int, rotary_fraction: float, layout: Layout) -> Attention:
    """Return attention with about `hidden_size`, which tensor and sequence parallelism can still divide.

    If the heads fill the residual stream exactly, they still do. The rotated part of a head stays even.
    """
    heads, key_value_heads = _fewer_heads(before, layout)
    fills = before.heads * before.head_dim == before.hidden_size
    target = hidden_size / heads

    def legal(head_dim: int) -> bool:
        rotated = int(head_dim * rotary_fraction)
        even = int(before.head_dim * rotary_fraction) % 2 == 1 or (rotated % 2 == 0 and rotated >= 2)
        divides = before.hidden_size % layout.tp != 0 or heads * head_dim % layout.tp == 0
        return even and (divides or not fills)

    def cost(head_dim: int) -> tuple[bool, bool, float]:
        return head_dim < _SMALLEST_HEAD_DIM, head_dim % _SMALLEST_HEAD_DIM != 0, abs(log2(head_dim / target))

    candidates = filter(legal, range(2, min(before.head_dim, 4 * hidden_size) + 1, 2))
    head_dim = min(candidates, key=cost, default=before.head_dim)
    width = heads * head_dim
    if not fills:
        tiles = before.hidden_size % before.heads == 0
        unit = lcm(_MULTIPLE, heads if tiles else 1, layout.tp if before.hidden_size % layout.tp == 0 else 1)
        width = max(1, round(hidden_size / unit)) * unit
    if width > before.hidden_size:
        return before
    return Attention(hidden_size=width, heads=heads, key_value_heads=key_value_heads, head_dim=head_dim)


def _fewer_heads(before: Attention, layout: Layout) -> tuple[int, int]:
    """Return about 8 query heads and their key/value heads, with the original ratio and divisors if possible."""
    units = (layout.tp, layout.sp, layout.tp * layout.sp)
    most = max(_MOST_HEADS, 2 * layout.tp * layout.sp)

    def keeps(new: int, old: int) -> bool:
        return all(new % unit == 0 for unit in units if old % unit == 0)

    def cost(pair: tuple[int, int]) -> tuple[bool, bool, bool, float]:
        heads, shared = pair
        return (
            (heads == shared) != (before.heads == before.key_value_heads),
            heads * before.key_value_heads != shared * before.heads,
            shared < min(2, before.key_value_heads),
            abs(log2(heads / _USUAL_HEADS)),
        )

    pairs = [
        (heads, shared)
        for shared in range(1, min(before.key_value_heads, most) + 1)
        if keeps(shared, before.key_value_heads)
        and all(unit % shared == 0 for unit in units if unit % before.key_value_heads == 0)
        for heads in range(shared, min(before.heads, most) + 1, shared)
        if keeps(heads, before.heads)
    ]
    return min(pairs, key=cost, default=(before.heads, before.key_value_heads))


def _rotary_fraction(config: ModelConfig, attention: Attention) -> float:
    if is_count(config.get("rotary_dim")):
        return float(config["rotary_dim"] / attention.head_dim)
    sections: list[ModelConfig] = [config]
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(config.get(name), dict):
            sections += [config[name], *(nested for nested in config[name].values() if isinstance(nested, dict))]
    stated = [section.get(name) for section in sections for name in _ROTARY_FRACTIONS]
    fractions = [float(value) for value in stated if isinstance(value, int | float) and 0 < value <= 1]
    return min(fractions, default=1.0)


def _put_heads(config: dict[str, Any], before: Attention, after: Attention) -> None:
    ratio = after.head_dim / before.head_dim

    def narrower(head_dim: int) -> int:
        least = min(head_dim, _SMALLEST_HEAD_DIM)
        return min(head_dim, max(least, ceil(head_dim * ratio / _SMALLEST_HEAD_DIM) * _SMALLEST_HEAD_DIM))

    old = {name: config[name] for name in counted(config, _LATENT_HEAD_DIMS)}
    for name in counted(config, (*old, *_OTHER_HEAD_DIMS)):
        config[name] = narrower(config[name])
    # With latent attention, Transformers writes `head_dim` and `qk_head_dim`, which repeat other fields.
    derived = {value: config.get(name) for name, value in old.items()}
    if {"qk_nope_head_dim", "qk_rope_head_dim"} <= old.keys():
        total = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        derived |= {old["qk_nope_head_dim"] + old["qk_rope_head_dim"]: total}
        derived |= {old["qk_rope_head_dim"]: config["qk_rope_head_dim"]}
    derived.setdefault(before.head_dim, after.head_dim)
    for name in counted(config, (*_HEAD_DIMS, "qk_head_dim")):
        config[name] = derived.get(config[name], narrower(config[name]))
    if is_count(config.get("rotary_dim")):
        config["rotary_dim"] = config["rotary_dim"] * after.head_dim // before.head_dim
    scalar = {before.hidden_size // before.heads: after.hidden_size // after.heads, before.head_dim: after.head_dim}
    if config.get("query_pre_attn_scalar") in scalar:
        config["query_pre_attn_scalar"] = scalar[config["query_pre_attn_scalar"]]
    for names, count in ((_HEADS, after.heads), (_KEY_VALUE_HEADS, after.key_value_heads)):
        for name in counted(config, names):
            config[name] = min(config[name], count)
    # Heads of indexers and linear attention are divided by one number, so that their ratios stay.
    counts = [config[name] for name in counted(config, _OTHER_HEADS)]
    if counts:
        divisor = max(d for d in range(1, max(1, min(counts) // 2) + 1) if all(count % d == 0 for count in counts))
        for name in counted(config, _OTHER_HEADS):
            config[name] = config[name] // divisor


def _in_proportion(value: int, before: Attention, ratio: float, layout: Layout) -> int:
    if value == before.hidden_size:
        return round(value * ratio)
    unit = lcm(_MULTIPLE, layout.tp)
    return min(value, max(1, ceil(value * ratio / unit)) * unit)


def fewer_experts(config: dict[str, Any], *, expert_parallel: int) -> None:
    """Reduce the routed experts to a multiple of `expert_parallel` and of the groups, above the experts per token."""
    experts = next((config[name] for name in counted(config, _EXPERTS)), None)
    if experts is None:
        return
    per_token = next((config[name] for name in counted(config, _EXPERTS_PER_TOKEN)), 1)
    groups = config["n_group"] if is_count(config.get("n_group")) else 1
    selected_groups = config["topk_group"] if is_count(config.get("topk_group")) else groups
    new_per_token = min(per_token, _MOST_EXPERTS_PER_TOKEN)
    new_groups = min(groups, _MOST_GROUPS)
    new_selected = max(1, ceil(selected_groups * new_groups / groups))
    if selected_groups < groups:
        new_selected = min(new_selected, new_groups - 1)
    unit = lcm(new_groups, expert_parallel if experts % expert_parallel == 0 else 1)
    # The score of a group is that of its two best experts, and the selected groups must have all experts of a token.
    least = max(2 * expert_parallel, 2 * new_per_token, 2 * new_groups, ceil(new_per_token / new_selected) * new_groups)
    count = ceil(least / unit) * unit
    if count >= experts:
        return
    for names, value in (
        (_EXPERTS, count),
        (_EXPERTS_PER_TOKEN, new_per_token),
        (("n_group",), new_groups),
        (("topk_group",), new_selected),
    ):
        for name in counted(config, names):
            config[name] = min(config[name], value)


LAYER_COUNTS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "encoder_layers",
    "decoder_layers",
    "num_decoder_layers",
)
"""Fields with the number of layers; those of the main stack first."""

# The longest known pattern: Jamba has one attention layer in 8.
_LONGEST_PERIOD = 8
# Counts of untrusted files are never expanded without a limit.
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
    "sliding_window_pattern",
    "full_attention_interval",
    "no_rope_layer_interval",
    "global_attn_every_n_layers",
)
_NOT_PER_LAYER = re.compile(r"token_(ids?|index)$|architectures$|_indexes$|_grid_pinpoints$|dims$")


def keep_layers(config: dict[str, Any], kept: Sequence[int]) -> None:
    """Adapt all fields that count or list layers to the layers that stay."""
    total = layer_count(config)
    assert total is not None, "a stack has a number of layers"
    for name, values in list(_per_layer_lists(config, total)):
        config[name] = [values[index] for index in kept]
    for name in LAYER_INDICES:
        if isinstance(config.get(name), list):
            config[name] = [new for new, old in enumerate(kept) if old in config[name]]
    # Thresholds are numbers of layers.
    for name in counted(config, (*_DENSE_PREFIXES, "max_window_layers")):
        config[name] = sum(index < config[name] for index in kept)
    if is_count(config.get("moe_layer_end_index")):
        config["moe_layer_end_index"] = max(0, sum(i <= config["moe_layer_end_index"] for i in kept) - 1)
    if is_count(config.get("num_kv_shared_layers")):
        config["num_kv_shared_layers"] = max(1, config["num_kv_shared_layers"] * len(kept) // total)
    for name in counted(config, LAYER_COUNTS):
        config[name] = min(config[name], len(kept))
    patterns = _expanded(config.get("attention_types"))
    if len(patterns) == total:
        config["attention_types"] = [[[patterns[index] for index in kept], 1]]


def layer_count(config: ModelConfig) -> int | None:
    return next((config[name] for name in counted(config, LAYER_COUNTS)), None)


def kept_layers(config: ModelConfig, *, layers: int, pipeline_stages: int) -> list[int]:
    """Return the indices of the layers to keep, ascending.

    Layers are kept in blocks of one period of their pattern, so that each layer keeps its position in it: first the
    blocks with a new type of layer, then the last blocks.
    """
    total = layer_count(config)
    assert total is not None, "a stack has a number of layers"
    # Everything that distinguishes a layer, as text.
    columns: list[list[object]] = [values for _, values in _per_layer_lists(config, total)]
    columns += [
        [index in config[name] for index in range(total)]
        for name in LAYER_INDICES
        if isinstance(config.get(name), list)
    ]
    thresholds = [*_DENSE_PREFIXES, *(["max_window_layers"] if config.get("use_sliding_window") else [])]
    columns += [[index < config[name] for index in range(total)] for name in thresholds if is_count(config.get(name))]
    patterns = _expanded(config.get("attention_types"))
    if len(patterns) == total:
        columns.append(patterns)
    kinds = [json.dumps([column[index] for column in columns], default=str) for index in range(total)]
    # Period of everything that Transformers computes from the layer index.
    computed = lcm(*(config[name] for name in _PERIODS if is_count(config.get(name))))
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


def _per_layer_lists(config: ModelConfig, total: int) -> Iterator[tuple[str, list[object]]]:
    """Yield every list with one entry per layer (`no_rope_layers` can have more)."""
    for name, value in config.items():
        if not isinstance(value, list) or name in LAYER_INDICES or _NOT_PER_LAYER.search(name):
            continue
        if len(value) == total or (name == "no_rope_layers" and len(value) > total):
            yield name, value[:total]


def _period(values: list[object]) -> int:
    for period in range(1, min(_LONGEST_PERIOD, len(values)) + 1):
        if all(value == values[index % period] for index, value in enumerate(values)):
            return period
    return 1


def _expanded(attention_types: object) -> list[object]:
    """Return the attention type of each layer from pairs of a pattern and its repetitions (GPT-Neo)."""
    kinds: list[object] = []
    for pair in attention_types if isinstance(attention_types, list) else []:
        if isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], list) and is_count(pair[1]):
            kinds += pair[0] * min(pair[1], _MOST_REPEATS)
    return kinds


MOST_REHEARSED_TOKENS = 128
"""Maximum tokens of a rehearsed sequence, unless sequence or context parallelism requires more."""
_LAYERS, _VOCABULARY = 4, 1024

_TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
_TOWER_CONFIGS = ("vision_config", "audio_config")
_DEPTHS = ("num_hidden_layers", "depth", "num_layers")
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "max_seq_len", "seq_length")
_WINDOWS = ("sliding_window", "sliding_window_size", "attention_chunk_size", "window_size", "local_attention")
_ROPE = ("rope_scaling", "rope_parameters")
_ROPE_LISTS = ("short_factor", "long_factor")
_SMALLEST_WINDOW = 8
_TOKEN_IDS = re.compile(r"_token_(id|ids|index)$")
_IMPLIED_TOKEN_IDS: Mapping[str, Mapping[str, int]] = {"phi3": {"pad_token_id": 32000}}
"""Token ids that index the embedding although the config does not have them (transformers/models/phi3)."""


def rehearsed_sequence(seq_len_tokens: int, layout: Layout) -> int:
    """Return the tokens of a rehearsed sequence: at most 128, and a multiple of `2 * sp * cp`.

    It exceeds 128 tokens, or the original length, only if that multiple does.
    """
    unit = 2 * layout.sp * layout.cp
    return max(1, min(seq_len_tokens, MOST_REHEARSED_TOKENS) // unit) * unit


def shrink_model_config(
    config: ModelConfig, *, layout: Layout, seq_len_tokens: int, hidden_size: int = 128
) -> tuple[dict[str, Any], tuple[Change, ...]]:
    """Return a small model of the same classes whose parameters have the same names, and all changed values.

    `seq_len_tokens` is the original sequence length. Position limits and attention windows above (below) it stay above
    (below) the rehearsed length. `hidden_size`, 4 layers and 1,024 tokens of a vocabulary are targets: patterns of
    layers and parallel axes can require slightly more. Sizes never grow, and absent or null sizes stay as they are.

    Raises:
        RefusedInputError: The config is invalid, or does not set its number of layers or its width.
    """
    errors = config_errors(config, source="config.json")
    nested = [config[name] for name in _TEXT_CONFIGS if isinstance(config.get(name), dict)]
    for part in [config, *nested] if not errors else []:
        if part is config and nested and not any(name in config for name in (*LAYER_COUNTS, *HIDDEN_SIZES)):
            continue
        if not _states_sizes(part):
            errors.append(
                ConfigError(
                    where="config.json" if part is config else "config.json: text_config",
                    rule=f"must set its layers ({LAYER_COUNTS[0]}) and width ({HIDDEN_SIZES[0]}) to be shrunk",
                    fix="add the defaults of Transformers",
                )
            )
    if errors:
        raise RefusedInputError(errors)
    whole = deepcopy(dict(config))
    parts = [part for name in _TEXT_CONFIGS if (part := section_of(whole, name)) is not None]
    if _states_sizes(whole):
        parts.insert(0, whole)
    rehearsed = rehearsed_sequence(seq_len_tokens, layout)
    for part in parts:
        # All layers get the same widths.
        part.pop("per_layer_config", None)
        # With dropout, attention on a CPU leaves its fused kernel and keeps every score.
        for name, value in part.items():
            if "drop" in name and isinstance(value, float) and value > 0:
                part[name] = 0.0
        total = layer_count(part)
        if total is not None and (total > _LAYERS or total % layout.pp):
            keep_layers(part, kept_layers(part, layers=_LAYERS, pipeline_stages=layout.pp))
        attention = narrow(part, hidden_size=hidden_size, layout=layout)
        fewer_experts(part, expert_parallel=layout.ep)
        _shorten(part, before=seq_len_tokens, after=rehearsed)
        if attention is not None:
            _resize_rope(part, *attention)
            _shrink_towers(whole, *attention, _LAYERS)
        part.pop("quantization_config", None)
    whole.pop("quantization_config", None)
    _move_vocabulary(whole, parts, _VOCABULARY // layout.tp * layout.tp)
    return whole, changes_between(config, whole)


def _states_sizes(config: ModelConfig) -> bool:
    return layer_count(config) is not None and any(is_count(config.get(name)) for name in HIDDEN_SIZES)


def _shorten(config: dict[str, Any], *, before: int, after: int) -> None:
    def scaled_window(window: object) -> object:
        if not isinstance(window, int) or not is_count(window):
            return window
        if window >= before:
            return min(window, max(after, window * after // before))
        return min(window, max(_SMALLEST_WINDOW, window * after // before), max(1, after - 1))

    limits = [config[name] for name in counted(config, _POSITIONS)]
    for name in counted(config, _POSITIONS):
        config[name] = min(config[name], max(after, config[name] * after // before))
    for name in _WINDOWS:
        window = config.get(name)
        if window is not None:
            config[name] = [scaled_window(w) for w in window] if isinstance(window, list) else scaled_window(window)
    shortened = [config[name] for name in counted(config, _POSITIONS)]
    ratio = shortened[0] / limits[0] if limits else after / before
    _scale_original_positions(config, ratio, before=before, after=after)


def _scale_original_positions(config: dict[str, Any], ratio: float, *, before: int, after: int) -> None:
    """Scale the length before rotary scaling with the position limit, here and in nested rotary settings."""
    name = "original_max_position_embeddings"
    original = config.get(name)
    if is_count(original):
        scaled = max(2, round(original * ratio))
        config[name] = min(original, max(scaled, after) if original >= before else scaled)
    for section in (*_ROPE, "full_attention", "sliding_attention"):
        if (inner := section_of(config, section)) is not None:
            _scale_original_positions(inner, ratio, before=before, after=after)


def _resize_rope(config: dict[str, Any], before: Attention, after: Attention) -> None:
    """Reduce the rotary factors per frequency, and the sections of frequencies, to the remaining frequencies."""
    for name in _ROPE:
        section = section_of(config, name)
        if section is None:
            continue
        for factors in _ROPE_LISTS:
            values = section.get(factors)
            if isinstance(values, list) and values:
                count = max(1, len(values) * after.head_dim // before.head_dim)
                section[factors] = [values[index * len(values) // count] for index in range(count)]
        parts = section.get("mrope_section")
        if isinstance(parts, list) and all(is_count(part) for part in parts) and after != before:
            count = sum(parts) * after.head_dim // before.head_dim
            smaller = [max(1, part * count // sum(parts)) for part in parts[:-1]]
            section["mrope_section"] = [*smaller, max(1, count - sum(smaller))]


def _shrink_towers(whole: dict[str, Any], before: Attention, after: Attention, layers: int) -> None:
    """Reduce the depth of a multimodal model's other towers, and project them to the text decoder's new width."""
    for name in _TOWER_CONFIGS:
        tower = section_of(whole, name)
        if tower is None:
            continue
        width = "hidden_size" if is_count(tower.get("embed_dim")) else "out_hidden_size"
        if tower.get(width) == before.hidden_size:
            tower[width] = after.hidden_size
        depth = next((key for key in _DEPTHS if is_count(tower.get(key))), None)
        if depth is None or tower[depth] <= layers:
            continue
        for key, value in list(tower.items()):
            if key.endswith(("_indexes", "_indices")) and isinstance(value, list):
                tower[key] = sorted({index * layers // tower[depth] for index in value})
        tower[depth] = layers


def _move_vocabulary(whole: dict[str, Any], parts: list[dict[str, Any]], vocab_size: int) -> None:
    """Reduce the vocabulary, and move each special token outside it to a free id at its end."""
    sections = [whole, *(part for part in parts if part is not whole)]
    before = next((part.get("vocab_size") for part in parts if is_count(part.get("vocab_size"))), None)
    if before is None or before <= vocab_size:
        return
    for section in sections:
        for name in counted(section, ("vocab_size", "vocab_size_per_layer_input")):
            section[name] = min(section[name], vocab_size)
        for name, implied in _IMPLIED_TOKEN_IDS.get(str(section.get("model_type")), {}).items():
            section.setdefault(name, implied)
    token_ids = [value for section in sections for name in _token_fields(section) for value in _ids(section.get(name))]
    used = {value for value in token_ids if value < vocab_size}
    free = (token for token in reversed(range(vocab_size)) if token not in used)
    moved: dict[int, int] = {}
    for value in token_ids:
        if value >= vocab_size and value not in moved:
            moved[value] = next(free, vocab_size - 1)
    for section in sections:
        for name in _token_fields(section):
            value = section[name]
            ids = [moved.get(token, token) for token in value] if isinstance(value, list) else moved.get(value, value)
            section[name] = ids


def _token_fields(section: dict[str, Any]) -> list[str]:
    return [name for name, value in section.items() if _TOKEN_IDS.search(name) and _ids(value)]


def _ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [token for token in values if isinstance(token, int) and not isinstance(token, bool)]


MOST_MICRO_BATCH = 2
"""Maximum sequences of a rehearsed micro-batch."""
MOST_ACCUMULATION = 2
"""Maximum micro-batches of a rehearsed step: two are sufficient to test accumulation. A pipeline has one per stage."""

_SMALLEST_BUCKET = 4096
_LOOPBACK = "127.0.0.1"
_ZERO_KEYS: Mapping[str, tuple[str, ...]] = {
    "reduce_bucket_size": ("reduce_bucket_size",),
    "stage3_prefetch_bucket_size": ("stage3_prefetch_bucket_size", "prefetch_bucket_size"),
    "stage3_param_persistence_threshold": ("stage3_param_persistence_threshold", "param_persistence_threshold"),
    "stage3_max_live_parameters": ("stage3_max_live_parameters", "max_live_parameters"),
    "stage3_max_reuse_distance": ("stage3_max_reuse_distance", "max_reuse_distance"),
    "sub_group_size": ("sub_group_size",),
}
"""Keys of `zero_optimization` for each field, including DeepSpeed's aliases (runtime/zero/config.py)."""


def shrink_layout(layout: Layout, *, ranks: int) -> tuple[Layout, tuple[Change, ...]]:
    """Return the same layout on `ranks` ranks of one node, with at most two sequences and two micro-batches.

    Only the data-parallel size changes: `dp_replicate` without sharding, otherwise `dp_shard`.

    Raises:
        UsageError: The other axes do not divide the ranks; all errors together, with the nearest legal numbers.
    """
    errors = _rank_errors(layout, ranks)
    if errors:
        raise UsageError(errors)
    data = ranks // (layout.tp * layout.pp * layout.sp * layout.cp)
    replicates = layout.engine in ("single", "ddp") or layout.zero_stage == 0
    smaller = replace(
        layout,
        dp_replicate=data if replicates else layout.dp_replicate,
        dp_shard=layout.dp_shard if replicates else data // layout.dp_replicate,
        micro_batch_size=min(layout.micro_batch_size, MOST_MICRO_BATCH),
        gradient_accumulation_steps=min(layout.gradient_accumulation_steps, max(MOST_ACCUMULATION, layout.pp)),
        # The rehearsed model has few layers: one is recomputed, the others are not.
        checkpointed_layers=None if layout.checkpointed_layers is None else 1,
        offloaded_checkpoints=min(layout.offloaded_checkpoints, 1),
    )
    changes = (
        Change(where=field.name, before=getattr(layout, field.name), after=getattr(smaller, field.name))
        for field in fields(layout)
    )
    return smaller, tuple(change for change in changes if change.before != change.after)


def _rank_errors(layout: Layout, ranks: int) -> list[ConfigError]:
    if layout.engine == "single":
        rule, fix = "must be 1: the plan has one process", "use --ranks 1"
        return [] if ranks == 1 else [ConfigError(where="ranks", value=ranks, rule=rule, fix=fix)]
    unit = layout.tp * layout.pp * layout.sp * layout.cp
    sharded = layout.engine == "fsdp2" or (layout.zero_stage or 0) > 0
    replicas = layout.dp_replicate if sharded else 1
    step = lcm(unit * replicas, unit * layout.ep, layout.zero.hpz_partition_size)
    # A hybrid layout with one shard per replica would not shard anything.
    least = ceil(2 * unit * replicas / step) * step if replicas > 1 and layout.dp_shard > 1 else step
    errors = []
    if ranks % step or ranks < least:
        below = ranks // step * step
        nearest = [below, below + step] if below >= least else [least]
        rule = f"must be a multiple of {step}, of at least {least}, for the axes of {layout.label}"
        fix = f"use --ranks {' or '.join(map(str, nearest))}"
        errors.append(ConfigError(where="ranks", value=ranks, rule=rule, fix=fix))
    if layout.zero.quantized_gradients:
        rule, nodes_fix = "requires several nodes, and a rehearsal has one", "rehearse a plan without it"
        errors.append(ConfigError(where="quantized_gradients", value=True, rule=rule, fix=nodes_fix))
    return errors


def shrink_zero_options(
    zero: ZeroOptions, *, original: ModelSpec, shrunken: ModelSpec, shards_before: int = 1, shards: int = 1
) -> ZeroOptions:
    """Return ZeRO sizes scaled from the original model to the shrunken one.

    Buckets, prefetch, live parameters and reuse distance scale with the parameter count. Sub-groups scale with the
    shard of one rank; `shards_before` and `shards` are the ranks that share the parameters. A module that could be
    gathered still can be, and parameters in several buckets or sub-groups still are. Sizes of 0 stay 0.
    """
    ratio = shrunken.parameter_count / original.parameter_count

    def scaled(size: int, *, whole_before: int, whole: int, least: int = _SMALLEST_BUCKET) -> int:
        several = size < whole_before
        wanted = max(least, ceil(size * whole / whole_before))
        return min(size, max(1, min(wanted, whole // 2)) if several else max(wanted, whole))

    def bucket(size: int, least: int = _SMALLEST_BUCKET) -> int:
        whole_before, whole = original.parameter_count, shrunken.parameter_count
        return size and scaled(size, whole_before=whole_before, whole=whole, least=least)

    def gathered(size: int) -> int:
        fits = size >= original.largest_gather_unit()
        return bucket(size, least=shrunken.largest_gather_unit() if fits else _SMALLEST_BUCKET)

    threshold = _persistence_threshold(zero.stage3_param_persistence_threshold, original, shrunken)
    reduce_bucket = bucket(zero.reduce_bucket_size)
    smaller = replace(
        zero,
        reduce_bucket_size=min(zero.reduce_bucket_size, reduce_bucket + reduce_bucket % 2),
        stage3_prefetch_bucket_size=bucket(zero.stage3_prefetch_bucket_size),
        stage3_param_persistence_threshold=threshold,
        stage3_max_live_parameters=gathered(zero.stage3_max_live_parameters),
        stage3_max_reuse_distance=gathered(zero.stage3_max_reuse_distance),
        sub_group_size=zero.sub_group_size
        and scaled(
            zero.sub_group_size,
            whole_before=ceil(original.parameter_count / shards_before),
            whole=ceil(shrunken.parameter_count / shards),
        ),
    )
    if zero.parameter_buffer_elements:
        swapped = [p.numel for p in shrunken.parameters if p.numel > threshold]
        wanted = max([ceil(zero.parameter_buffer_elements * ratio), *swapped])
        smaller = replace(smaller, parameter_buffer_elements=wanted)
    return smaller


def _persistence_threshold(threshold: int, original: ModelSpec, shrunken: ModelSpec) -> int:
    """Return the threshold for which the fewest tensors change between persistent and sharded."""
    persistent = {p.name for p in original.parameters if p.numel <= threshold}
    sizes = [(p.numel, p.name in persistent) for p in shrunken.parameters]

    def mismatches(candidate: int) -> int:
        return sum((numel <= candidate) != is_persistent for numel, is_persistent in sizes)

    aim = threshold * shrunken.dimensions.hidden_size // max(1, original.dimensions.hidden_size)
    edges = {numel - 1 for numel, _ in sizes} | {numel for numel, _ in sizes} | {aim, 0}
    legal = [candidate for candidate in edges if 0 <= candidate <= threshold]
    return min(legal, key=lambda candidate: (mismatches(candidate), abs(candidate - aim)))


def shrink_deepspeed_config(
    copy: dict[str, Any], *, zero: ZeroOptions, nvme_path: str, before: Layout, after: Layout
) -> None:
    """Write the sizes of `zero` into a `ds_config.json` in place of its numbers; all other values are unchanged.

    Batch sizes of the planned layout `before` become those of the rehearsed layout `after`.
    """
    section = section_of(copy, "zero_optimization")
    if section is not None:
        for field, keys in _ZERO_KEYS.items():
            for key in keys:
                _put_smaller(section, key, getattr(zero, field))
        for name in ("offload_optimizer", "offload_param"):
            offload = section_of(section, name)
            if offload is not None:
                if offload.get("nvme_path") is not None:
                    offload["nvme_path"] = nvme_path
                if name == "offload_param" and zero.parameter_buffer_elements:
                    _put_smaller(offload, "buffer_size", zero.parameter_buffer_elements)
    for key, planned, smaller in (
        ("train_micro_batch_size_per_gpu", before.micro_batch_size, after.micro_batch_size),
        ("gradient_accumulation_steps", before.gradient_accumulation_steps, after.gradient_accumulation_steps),
        ("train_batch_size", before.global_batch_size, after.global_batch_size),
    ):
        stated = copy.get(key)
        if is_count(stated):
            # A value that differs from the plan's still does, so that the launch fails as it would on GPUs.
            copy[key] = smaller if stated == planned else planned if stated == smaller else stated


def _put_smaller(section: dict[str, Any], key: str, value: int) -> None:
    stated = section.get(key)
    if isinstance(stated, int | float) and not isinstance(stated, bool) and stated > value:
        section[key] = value


def shrink_accelerate_config(copy: dict[str, Any], *, ranks: int, deepspeed_config_file: str) -> None:
    """Make an `accelerate.yaml` one for ranks of this machine; all other values are unchanged.

    Absent keys stay absent. `parallelism_config_dp_shard_size` changes with the ranks if it was consistent with
    `num_processes`.
    """
    axes = section_of(copy, "parallelism_config")
    if axes is not None and is_count(axes.get("parallelism_config_dp_shard_size")):
        key = "parallelism_config_dp_shard_size"
        sizes = {name: value for name, value in axes.items() if name.endswith("_size") and is_count(value)}
        others = prod(sizes.values()) // sizes[key]
        if others * sizes[key] == copy.get("num_processes") and ranks % others == 0:
            axes[key] = ranks // others
    values = {"num_processes": ranks, "num_machines": 1, "main_process_ip": _LOOPBACK}
    for key, value in values.items():
        if copy.get(key) is not None:
            copy[key] = value
    deepspeed = section_of(copy, "deepspeed_config")
    if deepspeed is not None and deepspeed.get("deepspeed_config_file"):
        deepspeed["deepspeed_config_file"] = deepspeed_config_file
