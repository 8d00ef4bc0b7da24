"""Narrower layers with the divisibilities of the original: heads, widths, low ranks, experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, lcm, log2
from typing import Any

from ..specs.changes import Rewriting, is_count
from ..specs.strategy import Strategy

HIDDEN_SIZES = ("hidden_size", "n_embd", "n_embed", "d_model", "dim")
"""Names of the width of the residual stream."""
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_HEAD_DIMS = ("head_dim", "d_kv", "kv_channels")
_ROTARY_FRACTIONS = ("partial_rotary_factor", "rotary_pct", "rotary_percent")
_LATENT_HEAD_DIMS = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_OTHER_HEAD_DIMS = ("global_head_dim", "index_head_dim", "linear_key_head_dim", "linear_value_head_dim")
_OTHER_HEADS = ("index_n_heads", "linear_num_key_heads", "linear_num_value_heads", "num_global_key_value_heads")
_PROPORTIONAL = (
    "intermediate_size",
    "intermediate_size_mlp",
    "n_inner",
    "ffn_dim",
    "d_ff",
    "ffn_hidden_size",
    "hidden_dim",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "shared_intermediate_size",
    "moe_intermediate_size",
    "expert_ffn_hidden_size",
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "q_lora_rank",
    "kv_lora_rank",
    "hidden_size_per_layer_input",
    "laurel_rank",
    "word_embed_proj_dim",
    "embedding_size",
)
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
    """The width of the residual stream and how heads divide it."""

    hidden_size: int
    """Width of the residual stream."""
    heads: int
    """Query heads."""
    key_value_heads: int
    """Key/value heads."""
    head_dim: int
    """Width of one head."""


def narrow(config: Rewriting, *, hidden_size: int, strategy: Strategy) -> tuple[Attention, Attention] | None:
    """Scale every width to a residual stream of about `hidden_size`; return attention before and after.

    `None` means that the config states no hidden size or has its heads layer by layer.
    """
    before = _attention(config.values)
    if before is None:
        return None
    if before.hidden_size <= hidden_size:
        return before, before
    rotary = _rotary_fraction(config.values, before)
    after = smaller_attention(before, hidden_size=hidden_size, rotary_fraction=rotary, strategy=strategy)
    ratio = after.hidden_size / before.hidden_size
    _put_heads(config, before, after)
    _put_widths(config, before, ratio, strategy)
    _put_mamba_heads(config, after.hidden_size)
    overrides = config.inside("per_layer_config")
    for index in list(overrides.values) if overrides is not None else ():
        layer = overrides.inside(index) if overrides is not None else None
        if layer is not None:
            _put_heads(layer, before, after)
            _put_widths(layer, before, ratio, strategy)
    for name in HIDDEN_SIZES:
        if config.get(name) == before.hidden_size:
            config.put(name, after.hidden_size)
    return before, after


def _put_widths(config: Rewriting, before: Attention, ratio: float, strategy: Strategy) -> None:
    for name in _PROPORTIONAL:
        value = config.get(name)
        if isinstance(value, list):
            config.put(name, [_in_proportion(v, before, ratio, strategy) if is_count(v) else v for v in value])
        elif is_count(value):
            config.put(name, _in_proportion(value, before, ratio, strategy))


def _put_mamba_heads(config: Rewriting, hidden_size: int) -> None:
    """Let the heads of a state-space layer fill its inner width, `mamba_expand` times the hidden size."""
    heads, head_dim, expand = (config.get(f"mamba_{name}") for name in ("n_heads", "d_head", "expand"))
    if not (is_count(heads) and is_count(head_dim) and is_count(expand)):
        return
    inner = expand * hidden_size
    legal = [n for n in range(1, min(heads, _USUAL_HEADS) + 1) if inner % n == 0 and inner // n <= head_dim]
    if legal and inner < heads * head_dim:
        config.put("mamba_n_heads", legal[-1])
        config.put("mamba_d_head", inner // legal[-1])


def smaller_attention(before: Attention, *, hidden_size: int, rotary_fraction: float, strategy: Strategy) -> Attention:
    """Return attention of about `hidden_size` that tensor and sequence parallelism divide as they did before.

    Heads that filled the residual stream exactly still do; the rotated part of a head stays even.
    """
    heads, key_value_heads = _fewer_heads(before, strategy)
    fills = before.heads * before.head_dim == before.hidden_size
    target = hidden_size / heads

    def legal(head_dim: int) -> bool:
        rotated = int(head_dim * rotary_fraction)
        even = int(before.head_dim * rotary_fraction) % 2 == 1 or (rotated % 2 == 0 and rotated >= 2)
        divides = before.hidden_size % strategy.tp != 0 or heads * head_dim % strategy.tp == 0
        return even and (divides or not fills)

    def cost(head_dim: int) -> tuple[bool, bool, float]:
        return head_dim < _SMALLEST_HEAD_DIM, head_dim % _SMALLEST_HEAD_DIM != 0, abs(log2(head_dim / target))

    candidates = filter(legal, range(2, min(before.head_dim, 4 * hidden_size) + 1, 2))
    head_dim = min(candidates, key=cost, default=before.head_dim)
    width = heads * head_dim
    if not fills:
        tiles = before.hidden_size % before.heads == 0
        unit = lcm(_MULTIPLE, heads if tiles else 1, strategy.tp if before.hidden_size % strategy.tp == 0 else 1)
        width = max(1, round(hidden_size / unit)) * unit
    if width > before.hidden_size:
        return before
    return Attention(hidden_size=width, heads=heads, key_value_heads=key_value_heads, head_dim=head_dim)


def _fewer_heads(before: Attention, strategy: Strategy) -> tuple[int, int]:
    """Return query and key/value heads near 8 with the original's ratio and divisors where that is possible."""
    units = (strategy.tp, strategy.sp, strategy.tp * strategy.sp)
    most = max(_MOST_HEADS, 2 * strategy.tp * strategy.sp)

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


def _attention(config: Mapping[str, Any]) -> Attention | None:
    hidden = next((config[name] for name in HIDDEN_SIZES if is_count(config.get(name))), None)
    heads = next((config[name] for name in _HEADS if config.get(name) is not None), None)
    shared = next((config[name] for name in _KEY_VALUE_HEADS if config.get(name) is not None), heads)
    if hidden is None or not is_count(heads) or not is_count(shared):
        return None
    stated = [config[name] for name in ("v_head_dim", *_HEAD_DIMS) if is_count(config.get(name))]
    head_dim = stated[0] if stated else max(1, hidden // heads)
    return Attention(hidden_size=hidden, heads=heads, key_value_heads=shared, head_dim=head_dim)


def _rotary_fraction(config: Mapping[str, Any], attention: Attention) -> float:
    if is_count(config.get("rotary_dim")):
        return float(config["rotary_dim"] / attention.head_dim)
    sections: list[Mapping[str, Any]] = [config]
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(config.get(name), dict):
            sections += [config[name], *(nested for nested in config[name].values() if isinstance(nested, dict))]
    stated = [section.get(name) for section in sections for name in _ROTARY_FRACTIONS]
    fractions = [float(value) for value in stated if isinstance(value, int | float) and 0 < value <= 1]
    return min(fractions, default=1.0)


def _put_heads(config: Rewriting, before: Attention, after: Attention) -> None:
    ratio = after.head_dim / before.head_dim

    def narrower(head_dim: int) -> int:
        least = min(head_dim, _SMALLEST_HEAD_DIM)
        return min(head_dim, max(least, ceil(head_dim * ratio / _SMALLEST_HEAD_DIM) * _SMALLEST_HEAD_DIM))

    old = {name: config.get(name) for name in _LATENT_HEAD_DIMS if is_count(config.get(name))}
    for name in (*old, *_OTHER_HEAD_DIMS):
        if is_count(config.get(name)):
            config.put(name, narrower(config.get(name)))
    # transformers writes down `head_dim` and `qk_head_dim` of latent attention, which repeat other fields.
    derived = {value: config.get(name) for name, value in old.items()}
    if {"qk_nope_head_dim", "qk_rope_head_dim"} <= old.keys():
        total = config.get("qk_nope_head_dim") + config.get("qk_rope_head_dim")
        derived |= {old["qk_nope_head_dim"] + old["qk_rope_head_dim"]: total}
        derived |= {old["qk_rope_head_dim"]: config.get("qk_rope_head_dim")}
    derived.setdefault(before.head_dim, after.head_dim)
    for name in (*_HEAD_DIMS, "qk_head_dim"):
        if is_count(config.get(name)):
            config.put(name, derived.get(config.get(name), narrower(config.get(name))))
    if is_count(config.get("rotary_dim")):
        config.put("rotary_dim", config.get("rotary_dim") * after.head_dim // before.head_dim)
    scalar = {before.hidden_size // before.heads: after.hidden_size // after.heads, before.head_dim: after.head_dim}
    if config.get("query_pre_attn_scalar") in scalar:
        config.put("query_pre_attn_scalar", scalar[config.get("query_pre_attn_scalar")])
    for names, count in ((_HEADS, after.heads), (_KEY_VALUE_HEADS, after.key_value_heads)):
        for name in names:
            if is_count(config.get(name)):
                config.put(name, min(config.get(name), count))
    _put_other_heads(config)


def _put_other_heads(config: Rewriting) -> None:
    """Divide the heads of indexers and linear attention by one number, so that their ratios stay."""
    counts = [config.get(name) for name in _OTHER_HEADS if is_count(config.get(name))]
    if counts:
        divisor = max(d for d in range(1, max(1, min(counts) // 2) + 1) if all(count % d == 0 for count in counts))
        for name in _OTHER_HEADS:
            if is_count(config.get(name)):
                config.put(name, config.get(name) // divisor)


def _in_proportion(value: int, before: Attention, ratio: float, strategy: Strategy) -> int:
    if value == before.hidden_size:
        return round(value * ratio)
    unit = lcm(_MULTIPLE, strategy.tp)
    return min(value, max(1, ceil(value * ratio / unit)) * unit)


def fewer_experts(config: Rewriting, *, expert_parallel: int) -> None:
    """Keep few routed experts: a multiple of `expert_parallel` and of their groups, more than a token is sent to."""
    experts = next((config.get(name) for name in _EXPERTS if is_count(config.get(name))), None)
    if experts is None:
        return
    per_token = next((config.get(name) for name in _EXPERTS_PER_TOKEN if is_count(config.get(name))), 1)
    groups = config.get("n_group") if is_count(config.get("n_group")) else 1
    chosen_groups = config.get("topk_group") if is_count(config.get("topk_group")) else groups
    new_per_token = min(per_token, _MOST_EXPERTS_PER_TOKEN)
    new_groups = min(groups, _MOST_GROUPS)
    new_chosen = max(1, ceil(chosen_groups * new_groups / groups))
    if chosen_groups < groups:
        new_chosen = min(new_chosen, new_groups - 1)
    unit = lcm(new_groups, expert_parallel if experts % expert_parallel == 0 else 1)
    # A group scores by its two best experts, and the chosen groups must hold all experts of a token.
    least = max(2 * expert_parallel, 2 * new_per_token, 2 * new_groups, ceil(new_per_token / new_chosen) * new_groups)
    count = ceil(least / unit) * unit
    if count >= experts:
        return
    for names, value in (
        (_EXPERTS, count),
        (_EXPERTS_PER_TOKEN, new_per_token),
        (("n_group",), new_groups),
        (("topk_group",), new_chosen),
    ):
        for name in names:
            if is_count(config.get(name)):
                config.put(name, min(config.get(name), value))
