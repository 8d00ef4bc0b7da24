"""Legality of Ulysses sequence parallelism: plain numbers and names in, faults out.

After deepspeed 0.19.8 (runtime/sequence_parallel/ulysses_sp.py) and accelerate 1.15.0 (utils/dataclasses.py,
big_modeling.py). Every rank holds a part of the sequence; within attention it holds a part of the heads instead, and
the mask of the model is not there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..specs.errors import Fault
from .candidate import divides, nearest

FULL_ATTENTION = frozenset({"full_attention", "attention"})
"""Layer types that read the whole past."""
WINDOWED_ATTENTION = frozenset({"sliding_attention", "chunked_attention", "local_attention"})
"""Layer types that read a part of the past, which only a mask or a flash kernel's own argument expresses."""
RECURRENT_MODELS = frozenset(
    {"bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "mamba"}
    | {"mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next", "recurrent_gemma"}
    | {"rwkv", "xlstm", "zamba", "zamba2"}
)
"""`model_type`s whose layers carry a state along the sequence, past the attention interface."""
_OWN_ATTENTION = "computes attention past the registry of Transformers, where heads are exchanged"
_OWN_LOSS = "declares no loss that takes shift_labels, which shards need"
_SINKS = "adds attention sinks of each head, which an exchange of heads leaves on other ranks"
UNSHAREABLE_MODELS = (
    dict.fromkeys(("big_bird", "codegen", "diffllama", "doge", "falcon", "fuyu", "gpt_neo"), _OWN_ATTENTION)
    | dict.fromkeys(("hrm_text",), _OWN_ATTENTION)
    | dict.fromkeys(("gpt_neox_japanese", "gptj", "megatron-bert", "rembert", "xglm"), _OWN_ATTENTION)
    | dict.fromkeys(("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "bloom", "cpmant", "ctrl"), _OWN_LOSS)
    | dict.fromkeys(("gpt2", "marian", "mbart", "mpt", "mvp", "openai-gpt", "pegasus", "plbart", "roformer"), _OWN_LOSS)
    | dict.fromkeys(("trocr", "whisper", "xlm", "xlnet"), _OWN_LOSS)
    | dict.fromkeys(("deepseek_v4", "gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4", "mimo_v2_flash"), _SINKS)
)
"""Why other `model_type`s of transformers 5.17.0 do not train on shards of their sequences."""
LENGTH_DEPENDENT_ROTATIONS = ("dynamic", "longrope")
"""`rope_type`s of Transformers (modeling_rope_utils.py, `dynamic_rope_update`)."""
WITHOUT_MASK = ("sdpa", "flash_attention_2", "flash_attention_3")
"""Attention implementations that compute causal attention without a mask."""
_RUNS_ALONE = ("cp", "tp", "pp")


def sequence_parallel_faults(
    *,
    sequence_parallel_size: int,
    engine: str,
    world_size: int,
    num_attention_heads: int,
    num_key_value_heads: int,
    seq_len_tokens: int | None = None,
    attention: str = "sdpa",
    model_type: str = "",
    layer_types: Iterable[str] = (),
    attention_window_tokens: int | None = None,
    has_equal_head_widths: bool = True,
    mask_dimensions: int = 2,
    context_parallel_size: int = 1,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    rope_type: str = "",
    offered_attention: Sequence[str] = WITHOUT_MASK,
) -> list[Fault]:
    """Return everything that forbids to share one sequence between `sequence_parallel_size` ranks.

    Args:
        sequence_parallel_size: Ranks that share a sequence.
        engine: What trains: `deepspeed`, `fsdp2`, `ddp` or `single`.
        world_size: All ranks.
        num_attention_heads: Query heads.
        num_key_value_heads: Key/value heads.
        seq_len_tokens: Length of every batch; `None` where batches are padded to a multiple anyway.
        attention: The model's attention implementation.
        model_type: As in `config.json`.
        layer_types: As in `config.json`; empty where every layer is of the model's one type.
        attention_window_tokens: Tokens that a layer looks back; `None` for all.
        has_equal_head_widths: Whether keys are as wide as values (they are not in multi-head latent attention).
        mask_dimensions: Dimensions of the attention mask in a batch.
        context_parallel_size: Ranks of torch context parallelism.
        tensor_parallel_size: Ranks of tensor parallelism.
        pipeline_parallel_size: Pipeline stages.
        rope_type: How rotary angles are scaled, as in `config.json`.
        offered_attention: The attention implementations without a mask that the model has.
    """
    size = sequence_parallel_size
    if size == 1:
        return []
    if size < 1:
        return [Fault(where="sp", value=size, rule="must be a positive number of ranks", fix="use 1 to switch it off")]
    faults = [] if engine == "deepspeed" else [_needs_deepspeed(size)]
    faults += _sizes(size, world_size, num_attention_heads, num_key_value_heads, seq_len_tokens)
    faults += attention_faults(attention=attention, mask_dimensions=mask_dimensions, offered=offered_attention)
    faults += _layers(size, model_type, layer_types, has_equal_head_widths=has_equal_head_widths)
    faults += _window(attention, layer_types, attention_window_tokens, seq_len_tokens)
    faults += rotation_faults(rope_type)
    others = (context_parallel_size, tensor_parallel_size, pipeline_parallel_size)
    faults += _excluded(size, dict(zip(_RUNS_ALONE, others, strict=True)))
    return faults


def attention_faults(*, attention: str, mask_dimensions: int = 2, offered: Sequence[str] = WITHOUT_MASK) -> list[Fault]:
    """Return what forbids an attention implementation or a mask under sequence parallelism.

    `offered` are those of `WITHOUT_MASK` that the model has.
    """
    faults = []
    from_hub = "/" in attention and "flash-attn" in attention
    if attention not in WITHOUT_MASK and not from_hub:
        rule = "cannot compute causal attention without a mask, which sequence parallelism drops"
        fix = f"load the model with attn_implementation={' or '.join(map(repr, offered))}"
        if not offered:
            fix = "use another model: this one has no other attention"
        faults.append(Fault(where="attn_implementation", value=attention, rule=rule, fix=fix))
    if mask_dimensions > 2:
        rule = "masks of more than 2 dimensions are dropped by sequence parallelism"
        fix = "give a mask [batch, sequence] of right padding, or none"
        faults.append(Fault(where="attention_mask", value=f"{mask_dimensions}-D", rule=rule, fix=fix))
    return faults


def equal_head_widths(values: Mapping[str, Any]) -> bool:
    """Return whether heads' values are as wide as their keys, by the names that configurations of Transformers have.

    >>> equal_head_widths({"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128})
    False
    """
    width = values.get("v_head_dim")
    keys = (values.get("qk_nope_head_dim") or 0) + (values.get("qk_rope_head_dim") or 0)
    return width is None or width == (keys or values.get("head_dim", width))


def rotation_faults(rope_type: str) -> list[Fault]:
    """Return what forbids rotary embeddings whose angles depend on the largest position, which differs by shard."""
    if rope_type not in LENGTH_DEPENDENT_ROTATIONS:
        return []
    rule = "turns by angles that depend on the last position of the whole sequence, which a shard does not see"
    return [Fault(where="rope_type", value=rope_type, rule=rule, fix="use linear, yarn or llama3 scaling")]


def sample_faults(*, left_padded: bool, packed: bool, attention: str, samples: int) -> list[Fault]:
    """Return what forbids the samples of a batch, whose attention is causal and has no mask.

    Args:
        left_padded: Whether a mask is 0 before a 1: later tokens would attend to padding.
        packed: Whether positions start anew within a row: documents would attend to those before them.
        attention: The model's attention implementation; flash kernels read documents from the positions.
        samples: Rows of the batch; flash kernels tell documents apart in one row only.
    """
    faults = []
    if left_padded:
        rule = "must be 1 for tokens and then 0 for padding: without a mask, tokens attend to what is left of them"
        fix = "pad on the right (tokenizer.padding_side = 'right')"
        faults.append(Fault(where="attention_mask", value="left padding", rule=rule, fix=fix))
    if packed and (attention == "sdpa" or samples > 1):
        rule = "position_ids that start anew within a row need a flash kernel and one row for each micro-batch"
        fix = "use flash_attention_2 with micro-batches of 1, or give every document a row of its own"
        faults.append(Fault(where="position_ids", value=f"packed, {attention}, {samples} rows", rule=rule, fix=fix))
    return faults


def _needs_deepspeed(size: int) -> Fault:
    rule = "sequence parallelism runs on DeepSpeed (Ulysses)"
    return Fault(where="sp", value=size, rule=rule, fix="use a ZeRO stage, or cp with FSDP2")


def _sizes(size: int, world_size: int, heads: int, kv_heads: int, seq_len: int | None) -> list[Fault]:
    checks = [
        divides("sp", size, world_size, "the ranks"),
        divides("sp", size, heads, "the attention heads"),
        _key_value_heads(size, kv_heads),
    ]
    legal = [
        count
        for count in range(1, heads + 1)
        if world_size % count == heads % count == 0 and (kv_heads % count == 0 or count % kv_heads == 0)
    ]
    faults = [replace(fault, fix=nearest(legal, size)) for fault in checks if fault is not None]
    length = None if seq_len is None else _sequence(size, seq_len)
    return faults if length is None else [*faults, length]


def _key_value_heads(size: int, kv_heads: int) -> Fault | None:
    if kv_heads % size == 0 or size % kv_heads == 0:
        return None
    rule = f"and the {kv_heads} key/value heads must divide one another ({kv_heads} % {size} = {kv_heads % size})"
    return Fault(where="sp", value=size, rule=rule)


def _sequence(size: int, seq_len: int) -> Fault | None:
    if seq_len % size == 0:
        return None
    below = seq_len // size * size
    near = f"{below} or {below + size}" if below else str(size)
    rule = f"must be a multiple of sp ({seq_len} % {size} = {seq_len % size})"
    return Fault(where="seq_len", value=seq_len, rule=rule, fix=f"nearest legal values: {near}")


def _layers(size: int, model_type: str, layer_types: Iterable[str], *, has_equal_head_widths: bool) -> list[Fault]:
    faults = []
    other = sorted(set(layer_types) - FULL_ATTENTION - WINDOWED_ATTENTION)
    if other or model_type in RECURRENT_MODELS:
        kinds = ", ".join(other) or f"of {model_type}"
        rule = f"layers {kinds} carry a state or an index along the sequence, which a shard would start anew"
        faults.append(Fault(where="sp", value=size, rule=rule, fix="use sp = 1, or a model with full attention"))
    if model_type in UNSHAREABLE_MODELS:
        rule = f"{model_type} {UNSHAREABLE_MODELS[model_type]}"
        faults.append(Fault(where="sp", value=size, rule=rule, fix="use sp = 1, or another model"))
    if not has_equal_head_widths:
        rule = "exchanges heads of one width, and latent attention has keys wider than values"
        faults.append(Fault(where="sp", value=size, rule=rule, fix="use sp = 1"))
    return faults


def instead_of_context_parallelism(
    model_type: str, layer_types: Iterable[str], window: int | None, *, has_equal_head_widths: bool
) -> str:
    """Return what to use where a model cannot pass keys around: sequence parallelism only where it runs."""
    types = set(layer_types)
    if "chunked_attention" in types or _layers(2, model_type, types, has_equal_head_widths=has_equal_head_widths):
        return "use cp = 1"
    windowed = bool(WINDOWED_ATTENTION & types) if types else window is not None
    return "use cp = 1, or sp with DeepSpeed" + (" and flash_attention_2" if windowed else "")


def _window(attention: str, layer_types: Iterable[str], window: int | None, seq_len: int | None) -> list[Fault]:
    types: Sequence[str] = sorted(set(layer_types))
    windowed = bool(WINDOWED_ATTENTION.intersection(types)) if types else window is not None
    chunked = "chunked_attention" in types
    fits = window is not None and seq_len is not None and seq_len <= window
    if not windowed or fits or (attention != "sdpa" and not chunked):
        return []
    rule = "expresses attention windows by a mask, which sequence parallelism drops: layers would read all the past"
    shown = "" if window is None else f", or sequences up to {window} tokens"
    fix = "use sp = 1" if chunked else "use flash_attention_2"
    return [Fault(where="attn_implementation", value=attention, rule=rule, fix=fix + shown)]


def _excluded(size: int, others: dict[str, int]) -> list[Fault]:
    found = [f"{name} = {other}" for name, other in others.items() if other > 1]
    if not found:
        return []
    rule = f"sequence parallelism does not combine with {', '.join(found)}"
    return [Fault(where="sp", value=size, rule=rule, fix="set one of them to 1")]
