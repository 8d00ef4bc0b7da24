"""A `config.json` of the same classes and divisibilities, small enough for CPU ranks to train in seconds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..models.model_config import config_faults
from ..specs.changes import Change, Rewriting, is_count
from ..specs.errors import Fault, RefusedInputError, UsageError
from ..specs.strategy import Strategy
from .layers import LAYER_COUNTS, cut_layers, layer_count
from .sizes import HIDDEN_SIZES, Attention, fewer_experts, narrow

__all__ = ["Change", "ShrunkenModel", "rehearsed_sequence", "shrink_model_config"]

MOST_REHEARSED_TOKENS = 128
"""Tokens of a rehearsed sequence, unless sequence or context parallelism need more."""
SMALLEST_VOCABULARY = 512
"""Tokens that hold all bytes beside special tokens."""

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
"""Token ids that index the embedding although the config leaves them out (transformers/models/phi3)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShrunkenModel:
    """A model to rehearse with."""

    config: dict[str, Any]
    """Its `config.json`."""
    changes: tuple[Change, ...]
    """Every value that is not the original's."""


def rehearsed_sequence(seq_len_tokens: int, strategy: Strategy) -> int:
    """Return the tokens of a rehearsed sequence: at most 128, and a multiple of `2 * sp * cp`.

    It is longer than 128 tokens, or than the original, only where that multiple is.
    """
    unit = 2 * strategy.sp * strategy.cp
    return max(1, min(seq_len_tokens, MOST_REHEARSED_TOKENS) // unit) * unit


def shrink_model_config(
    config: Mapping[str, Any],
    *,
    strategy: Strategy,
    seq_len_tokens: int,
    layers: int = 4,
    hidden_size: int = 128,
    vocab_size: int = 1024,
) -> ShrunkenModel:
    """Return a small model of the same classes whose parameters have the same names.

    `seq_len_tokens` is the sequence that the original trains on: position limits and attention windows stay on the
    side of the rehearsed sequence on which they were of it. `layers`, `hidden_size` and `vocab_size` are aims; a
    pattern of layers, or what tensor, pipeline, sequence and expert parallelism divide, may need a little more. A
    size that is small already stays, one that is absent or null stays so, and none grows.

    Raises:
        RefusedInputError: the config is invalid, or leaves its number of layers or its width to transformers.
        UsageError: a wanted size is too small; all faults together.
    """
    _check(config, seq_len_tokens=seq_len_tokens, layers=layers, hidden_size=hidden_size, vocab_size=vocab_size)
    whole = Rewriting(config)
    parts = [part for name in _TEXT_CONFIGS if (part := whole.inside(name)) is not None]
    if _states_sizes(whole.values):
        parts.insert(0, whole)
    rehearsed = rehearsed_sequence(seq_len_tokens, strategy)
    for part in parts:
        cut_layers(part, layers=layers, pipeline_stages=strategy.pp)
        attention = narrow(part, hidden_size=hidden_size, strategy=strategy)
        fewer_experts(part, expert_parallel=strategy.ep)
        _shorten(part, before=seq_len_tokens, after=rehearsed)
        if attention is not None:
            _resize_rope(part, *attention)
            _shrink_towers(whole, *attention, layers)
        part.drop("quantization_config")
    whole.drop("quantization_config")
    divisible = vocab_size // strategy.tp * strategy.tp
    if divisible < SMALLEST_VOCABULARY:
        divisible += strategy.tp
    _move_vocabulary(whole, parts, divisible)
    return ShrunkenModel(config=whole.values, changes=tuple(whole.changes))


def _states_sizes(config: Mapping[str, Any]) -> bool:
    return layer_count(config) is not None and any(is_count(config.get(name)) for name in HIDDEN_SIZES)


def _check(config: Mapping[str, Any], **sizes: int) -> None:
    least = {"seq_len_tokens": 1, "layers": 1, "hidden_size": 16, "vocab_size": SMALLEST_VOCABULARY}
    wrong = [
        Fault(where=name, value=value, rule=f"must be an integer of at least {least[name]}")
        for name, value in sizes.items()
        if not is_count(value) or value < least[name]
    ]
    if wrong:
        raise UsageError(wrong)
    faults = config_faults(config, source="config.json")
    nested = [config[name] for name in _TEXT_CONFIGS if isinstance(config.get(name), dict)]
    for part in [config, *nested] if not faults else []:
        if part is config and nested and not any(name in config for name in (*LAYER_COUNTS, *HIDDEN_SIZES)):
            continue
        if not _states_sizes(part):
            faults.append(
                Fault(
                    where="config.json" if part is config else "config.json: text_config",
                    rule=f"must state its layers ({LAYER_COUNTS[0]}) and width ({HIDDEN_SIZES[0]}) to be made small",
                    fix="write the sizes that transformers would fill in",
                )
            )
    if faults:
        raise RefusedInputError(faults)


def _shorten(config: Rewriting, *, before: int, after: int) -> None:
    """Scale position limits and attention windows with the sequence."""

    def scaled_window(window: object) -> object:
        if not isinstance(window, int) or not is_count(window):
            return window
        if window >= before:
            return min(window, max(after, window * after // before))
        return min(window, max(_SMALLEST_WINDOW, window * after // before), max(1, after - 1))

    limits = [config.get(name) for name in _POSITIONS if is_count(config.get(name))]
    for name in _POSITIONS:
        if is_count(config.get(name)):
            config.put(name, min(config.get(name), max(after, config.get(name) * after // before)))
    for name in _WINDOWS:
        window = config.get(name)
        if window is not None:
            config.put(name, [scaled_window(w) for w in window] if isinstance(window, list) else scaled_window(window))
    shortened = [config.get(name) for name in _POSITIONS if is_count(config.get(name))]
    ratio = shortened[0] / limits[0] if limits else after / before
    _scale_original_positions(config, ratio, before=before, after=after)


def _scale_original_positions(config: Rewriting, ratio: float, *, before: int, after: int) -> None:
    """Keep the length before rotary scaling in proportion to the position limit, here and in nested rotary settings."""
    name = "original_max_position_embeddings"
    original = config.get(name)
    if is_count(original):
        scaled = max(2, round(original * ratio))
        config.put(name, min(original, max(scaled, after) if original >= before else scaled))
    for section in (*_ROPE, "full_attention", "sliding_attention"):
        if (inner := config.inside(section)) is not None:
            _scale_original_positions(inner, ratio, before=before, after=after)


def _resize_rope(config: Rewriting, before: Attention, after: Attention) -> None:
    """Cut rotary factors of each frequency, and sections of frequencies, to the frequencies that are left."""
    for name in _ROPE:
        section = config.inside(name)
        if section is None:
            continue
        for factors in _ROPE_LISTS:
            values = section.get(factors)
            if isinstance(values, list) and values:
                count = max(1, len(values) * after.head_dim // before.head_dim)
                section.put(factors, [values[index * len(values) // count] for index in range(count)])
        parts = section.get("mrope_section")
        if isinstance(parts, list) and all(is_count(part) for part in parts) and after != before:
            count = sum(parts) * after.head_dim // before.head_dim
            smaller = [max(1, part * count // sum(parts)) for part in parts[:-1]]
            section.put("mrope_section", [*smaller, max(1, count - sum(smaller))])


def _shrink_towers(whole: Rewriting, before: Attention, after: Attention, layers: int) -> None:
    """Cut the depth of a multimodal model's other towers and let them end in the text decoder's new width."""
    for name in _TOWER_CONFIGS:
        tower = whole.inside(name)
        if tower is None:
            continue
        width = "hidden_size" if is_count(tower.get("embed_dim")) else "out_hidden_size"
        if tower.get(width) == before.hidden_size:
            tower.put(width, after.hidden_size)
        depth = next((key for key in _DEPTHS if is_count(tower.get(key))), None)
        if depth is None or tower.get(depth) <= layers:
            continue
        for key, value in list(tower.values.items()):
            if key.endswith(("_indexes", "_indices")) and isinstance(value, list):
                tower.put(key, sorted({index * layers // tower.get(depth) for index in value}))
        tower.put(depth, layers)


def _move_vocabulary(whole: Rewriting, parts: list[Rewriting], vocab_size: int) -> None:
    """Cut the vocabulary and give every special token beyond it an id of its own at its end."""
    sections = [whole, *(part for part in parts if part is not whole)]
    before = next((part.get("vocab_size") for part in parts if is_count(part.get("vocab_size"))), None)
    if before is None or before <= vocab_size:
        return
    for section in sections:
        for name in ("vocab_size", "vocab_size_per_layer_input"):
            if is_count(section.get(name)):
                section.put(name, min(section.get(name), vocab_size))
        for name, implied in _IMPLIED_TOKEN_IDS.get(str(section.get("model_type")), {}).items():
            section.values.setdefault(name, implied)
    found = [value for section in sections for name in _token_fields(section) for value in _ids(section.get(name))]
    taken = {value for value in found if value < vocab_size}
    free = (token for token in reversed(range(vocab_size)) if token not in taken)
    moved: dict[int, int] = {}
    for value in found:
        if value >= vocab_size and value not in moved:
            moved[value] = next(free, vocab_size - 1)
    for section in sections:
        for name in _token_fields(section):
            value = section.get(name)
            ids = [moved.get(token, token) for token in value] if isinstance(value, list) else moved.get(value, value)
            section.put(name, ids)


def _token_fields(section: Rewriting) -> list[str]:
    return [name for name, value in section.values.items() if _TOKEN_IDS.search(name) and _ids(value)]


def _ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [token for token in values if isinstance(token, int) and not isinstance(token, bool)]
