"""Rules of tensor, pipeline, expert, sequence and context parallelism, shared by the planner and the trainers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import gcd

from ..specs.errors import ConfigError, divides, nearest, nearest_divisors
from ..specs.layout import Layout, bubble_fraction
from ..specs.model import ModelTraits

LARGEST_ZERO_STAGE = 2
"""ZeRO-3 would shard over the data-parallel ranks what `tp` already shards, and gather it again in every layer."""

TENSOR_PARALLEL_FAMILIES = frozenset(
    {"gemma", "gemma2", "gemma3_text", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "starcoder2"}
)
"""`model_type`s whose losses, weights and checkpoints tests compare with one process."""

WITHOUT_TENSOR_PLAN: Mapping[str, str] = {
    "gpt2": "stores transposed Conv1D weights with query, key and value fused, which AutoTP does not shard",
    "bloom": "has no tensor-parallel plan in Transformers",
    "falcon": "has no tensor-parallel plan in Transformers",
    "opt": "has no tensor-parallel plan in Transformers",
    "stablelm": "has no tensor-parallel plan in Transformers",
}
"""Known reasons why a family is not supported."""


def tensor_parallel_errors(
    model: ModelTraits,
    layout: Layout,
    *,
    world_size: int | None = None,
    ranks_per_node: int | None = None,
    method: str = "full",
    where: str = "tp",
) -> list[ConfigError]:
    """Return the errors of a tensor-parallel layout; none for a size of 1.

    `pipeline_errors` has further rules for tensor parallelism inside pipeline stages.
    """
    size = layout.tp
    if size == 1:
        return []
    if size < 1:
        return [ConfigError(where=where, value=size, rule="must be at least 1", fix="use 1, 2, 4 or 8")]
    sizes = {"the attention heads": model.num_attention_heads, "the key/value heads": model.num_key_value_heads}
    if not model.num_experts:
        # In a mixture, this is the width of one expert, which tensor parallelism does not shard.
        sizes["the width of the MLP"] = model.intermediate_size
    if ranks_per_node is not None:
        sizes["the accelerators of a node"] = ranks_per_node
    if world_size is not None:
        sizes["the ranks"] = world_size
    fix = f"nearest legal values: {nearest_divisors(gcd(*sizes.values()), size)}"
    violations = [divides(where, size, number, what) for what, number in sizes.items()]
    errors = [replace(error, fix=fix) for error in violations if error is not None]
    if model.num_experts:
        rule = f"AutoTP does not support mixtures of experts ({model.num_experts} experts per layer)"
        errors.append(ConfigError(where=where, value=size, rule=rule, fix="use expert parallelism (ep) instead"))
    elif model.model_type and model.model_type not in TENSOR_PARALLEL_FAMILIES:
        rule = WITHOUT_TENSOR_PLAN.get(model.model_type, "is not verified with AutoTP")
        fix = f"use tp = 1 with ZeRO-3 or pp; tp supports {', '.join(sorted(TENSOR_PARALLEL_FAMILIES))}"
        errors.append(ConfigError(where="model_type", value=model.model_type, rule=rule, fix=fix))
    fix = f"use a ZeRO stage up to {LARGEST_ZERO_STAGE}"
    if layout.engine == "fsdp2":
        # accelerate/accelerator.py:1618 imports `transformers.integrations.tensor_parallel.ReplicateParallel`.
        rule = "is not supported with FSDP2: accelerate 1.15.0 imports a class that transformers 5.17.0 does not have"
        errors.append(ConfigError(where=where, value=size, rule=rule, fix=fix))
    elif layout.engine != "deepspeed" or layout.zero_stage is None:
        errors.append(ConfigError(where=where, value=size, rule="requires DeepSpeed (AutoTP)", fix=fix))
    elif layout.zero_stage > LARGEST_ZERO_STAGE:
        rule = f"requires ZeRO stage 0 to {LARGEST_ZERO_STAGE}, not {layout.zero_stage}"
        errors.append(ConfigError(where=where, value=size, rule=rule, fix=f"{fix}, or tp = 1"))
    if method != "full":
        rule = f"is not supported with {method}: AutoTP does not find the layers of its plan under the adapters' names"
        errors.append(ConfigError(where=where, value=size, rule=rule, fix="train all weights, or use tp = 1"))
    for name, other in (("sp", layout.sp), ("cp", layout.cp), ("ep", layout.ep)):
        if other != 1:
            rule = f"cannot be combined with {name} = {other}: AutoTP's mesh has tensor and data parallelism only"
            errors.append(ConfigError(where=where, value=size, rule=rule, fix=f"use tp = 1 or {name} = 1"))
    return errors


PIPELINE_MODEL_TYPES = ("gemma2", "gpt2", "llama", "mistral", "phi3", "qwen2", "qwen3")
"""Families whose causal language model can be split into stages."""
TENSOR_PARALLEL_PIPELINES = ("gemma2", "llama", "mistral", "qwen2", "qwen3")
"""Families whose stages support tensor parallelism; the others fuse or transpose the matrices."""
LARGEST_BUBBLE_PERCENT = 20
"""Idle percentage of a step above which `pipeline_warnings` warns."""


def pipeline_errors(
    model: ModelTraits,
    layout: Layout,
    *,
    world_size: int | None = None,
    micro_batches: int | None = None,
    method: str = "full",
) -> list[ConfigError]:
    """Return the errors of a pipeline; none for one stage."""
    stages = layout.pp
    if stages == 1:
        return []
    errors = stage_errors(
        stages=stages, num_layers=model.num_layers, world_size=world_size, tensor_parallel_size=layout.tp
    )
    if layout.engine != "deepspeed":
        rule = f"requires DeepSpeed, not {layout.engine}"
        errors.append(ConfigError(where="pp", value=stages, rule=rule, fix="use ZeRO stage 0 or 1"))
    else:
        stage, optimizer = layout.zero_stage, layout.offload_optimizer
        if stage is not None and stage > 1:
            rule = "pipelines require ZeRO stage 0 or 1: stages 2 and 3 free or move gradients and parameters that "
            rule += "later micro-batches need"
            fix = "nearest legal value: 1"
            errors.append(ConfigError(where="zero_optimization.stage", value=stage, rule=rule, fix=fix))
        if layout.offload_param != "none":
            rule, fix = "parameter offload requires ZeRO-3, which pipelines do not support", "use none, or more stages"
            errors.append(ConfigError(where="offload_param", value=layout.offload_param, rule=rule, fix=fix))
        if optimizer == "nvme" or (optimizer != "none" and stage == 0):
            rule, fix = "pipelines support optimizer offload to the CPU with ZeRO-1 only", "use cpu with ZeRO-1"
            errors.append(ConfigError(where="offload_optimizer", value=optimizer, rule=rule, fix=fix))
    errors += tensor_errors(model_type=model.model_type, tensor_parallel_size=layout.tp)
    reasons = {
        "sp": "DeepSpeed's grid has pipe, data and model axes only (deepspeed/runtime/pipe/topology.py)",
        "cp": "it requires FSDP2, but pipelines require DeepSpeed",
        "ep": "the families that support pipelines have no experts",
    }
    for axis, reason in reasons.items():
        if axis in layout.axes:
            rule, fix = f"cannot be combined with pp = {stages}: {reason}", f"use {axis} = 1 or pp = 1"
            errors.append(ConfigError(where=axis, value=layout.axes[axis], rule=rule, fix=fix))
    if model.model_type not in PIPELINE_MODEL_TYPES:
        rule, fix = f"pipelines support {', '.join(PIPELINE_MODEL_TYPES)}", "use ZeRO-3 for this model"
        errors.append(ConfigError(where="model_type", value=model.model_type, rule=rule, fix=fix))
    if method != "full":
        rule = "pipelines require full training: with adapters, some stages would have no trainable parameters"
        errors.append(ConfigError(where="method", value=method, rule=rule, fix="use full, or ZeRO with adapters"))
    if micro_batches is not None and micro_batches < 1:
        rule, fix = "must be at least 1", "nearest legal value: 1"
        errors.append(ConfigError(where="gradient_accumulation_steps", value=micro_batches, rule=rule, fix=fix))
    return errors


def stage_errors(
    *, stages: int, num_layers: int, world_size: int | None = None, tensor_parallel_size: int = 1
) -> list[ConfigError]:
    """Return the errors of a number of stages: 1 <= p <= layers, and p * tp divides the ranks."""
    if stages < 1:
        return [ConfigError(where="pp", value=stages, rule="must be at least 1", fix="nearest legal value: 1")]
    errors = []
    legal = [
        count
        for count in range(1, num_layers + 1)
        if world_size is None or world_size % (count * tensor_parallel_size) == 0
    ]
    if stages > num_layers:
        rule = f"the number of stages must not exceed the number of decoder layers: the model has {num_layers}"
        errors.append(ConfigError(where="pp", value=stages, rule=rule, fix=nearest(legal, stages) or "use pp = 1"))
    where = "pp" if tensor_parallel_size == 1 else "pp * tp"
    error = None if world_size is None else divides(where, stages * tensor_parallel_size, world_size, "the ranks")
    if error is None:
        return errors
    fix = nearest(legal, stages) or "use pp = 1"
    return [*errors, replace(error, fix=fix if where == "pp" else f"for pp, {fix}")]


def tensor_errors(*, model_type: str, tensor_parallel_size: int) -> list[ConfigError]:
    """Return the errors of tensor parallelism inside stages; `tensor_parallel_errors` checks heads and widths."""
    if tensor_parallel_size == 1 or model_type not in {*PIPELINE_MODEL_TYPES} - {*TENSOR_PARALLEL_PIPELINES}:
        return []
    rule = f"in a pipeline supports {', '.join(TENSOR_PARALLEL_PIPELINES)}, not {model_type}"
    return [ConfigError(where="tp", value=tensor_parallel_size, rule=rule, fix="use tp = 1 or pp = 1")]


def batch_errors(*, global_batch_size: int, micro_batch_size: int, data_parallel_size: int) -> list[ConfigError]:
    """Return the error of a global batch that is not a multiple of one micro-batch on every data-parallel rank."""
    unit = micro_batch_size * data_parallel_size
    if global_batch_size >= unit and global_batch_size % unit == 0:
        return []
    below = global_batch_size // unit * unit
    rule = f"must be a multiple of micro_batch_size * dp = {micro_batch_size} * {data_parallel_size} = {unit}"
    fix = f"nearest legal values: {', '.join(str(size) for size in (below, below + unit) if size)}"
    return [ConfigError(where="global_batch_size", value=global_batch_size, rule=rule, fix=fix)]


def pipeline_warnings(*, stages: int, micro_batches: int) -> tuple[str, ...]:
    """Return a warning if the step has too few micro-batches to keep the bubble small."""
    # (p - 1) / (m + p - 1) <= b  <=>  m >= (p - 1) * (1 - b) / b
    enough = -(-(stages - 1) * (100 - LARGEST_BUBBLE_PERCENT) // LARGEST_BUBBLE_PERCENT)
    if micro_batches >= enough:
        return ()
    return (
        f"{stages} pipeline stages are idle for {bubble_fraction(stages, micro_batches):.0%} of a step with "
        f"{micro_batches} micro-batches, (p - 1) / (m + p - 1); {enough} micro-batches reduce this to "
        f"{LARGEST_BUBBLE_PERCENT}%",
    )


AUTO_EP_MODEL_TYPES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3")
"""`model_type`s with an AutoEP preset that tests compare with one process."""


def expert_errors(
    model: ModelTraits, layout: Layout, *, method: str = "full", precision: str = "fp32"
) -> list[ConfigError]:
    """Return the errors of expert parallelism over `layout.ep` ranks; none for a size of 1.

    >>> mixtral = ModelTraits(model_type="mixtral", num_experts=8)
    >>> [str(error) for error in expert_errors(mixtral, Layout(engine="deepspeed", dp_shard=6, ep=3))]
    ['ep = 3: must divide the experts (8 % 3 = 2); nearest legal values: 2']
    """
    ep = layout.ep
    if ep == 1:
        return []

    def error(rule: str, fix: str = "") -> ConfigError:
        return ConfigError(where="ep", value=ep, rule=rule, fix=fix)

    errors = []
    if ep < 1:
        errors.append(error("must be at least 1"))
    elif not model.num_experts:
        errors.append(error("requires a mixture of experts, but the model is dense", "use ep = 1"))
    else:
        sizes = {"the experts": model.num_experts, "the data-parallel ranks": layout.data_parallel_size}
        fix = f"nearest legal values: {nearest_divisors(gcd(*sizes.values()), ep)}"
        violations = [divides("ep", ep, number, what) for what, number in sizes.items()]
        errors += [replace(violation, fix=fix) for violation in violations if violation is not None]
    if model.num_experts and model.model_type not in AUTO_EP_MODEL_TYPES:
        rule, fix = "AutoEP is not verified with this model", f"supported: {', '.join(AUTO_EP_MODEL_TYPES)}"
        errors.append(ConfigError(where="model_type", value=model.model_type, rule=rule, fix=fix))
    if layout.engine != "deepspeed":
        errors.append(error(f"requires DeepSpeed (AutoEP), not {layout.engine}", "use a ZeRO stage"))
    if method != "full":
        rule = f"is not supported with {method}: AutoEP requires trainable experts, but adapters freeze them"
        errors.append(error(rule, "train all weights, or use ep = 1"))
    if layout.engine == "deepspeed" and not layout.zero_stage and precision != "fp32":
        rule = "with ep requires fp32: without ZeRO, DeepSpeed's 16-bit optimizer starts with a step on zero gradients"
        errors.append(ConfigError(where="zero_optimization.stage", value=0, rule=rule, fix="use ZeRO stage 1, 2 or 3"))
    reasons = {
        "tp": "AutoTP does not support mixtures of experts",
        "pp": "AutoEP does not find the layers of a pipeline stage, which have other names",
        "sp": "AutoEP rejects it with ZeRO-3, and it is not verified with other stages",
        "cp": "it requires FSDP2, but AutoEP requires DeepSpeed",
    }
    for axis, reason in reasons.items():
        if axis in layout.axes:
            rule = f"cannot be combined with {axis} = {layout.axes[axis]}: {reason}"
            errors.append(error(rule, f"use {axis} = 1 or ep = 1"))
    if layout.zero_stage == 3:
        hpz = layout.zero.hpz_partition_size
        options = {f"hpz_partition_size = {hpz}": hpz > 1, "quantized_gradients": layout.zero.quantized_gradients}
        for name, is_set in options.items():
            if is_set:
                errors.append(error(f"cannot be combined with {name} in ZeRO-3", "omit the option, or use ZeRO-2"))
    for name in ("offload_optimizer", "offload_param"):
        if getattr(layout, name) == "nvme":
            rule = f"cannot be combined with {name} = 'nvme': DeepSpeed cannot save expert optimizer states from NVMe"
            errors.append(error(rule, "offload to cpu"))
    return errors


FULL_ATTENTION = frozenset({"full_attention", "attention"})
"""Layer types that attend to all earlier tokens."""
WINDOWED_ATTENTION = frozenset({"sliding_attention", "chunked_attention", "local_attention"})
"""Layer types that attend to some earlier tokens, which requires a mask or a flash kernel's window argument."""
RECURRENT_MODELS = frozenset(
    {"bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "mamba"}
    | {"mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next", "recurrent_gemma"}
    | {"rwkv", "xlstm", "zamba", "zamba2"}
)
"""`model_type`s whose layers carry a state along the sequence, outside the attention interface."""
_OWN_ATTENTION = "does not use the attention registry of Transformers, where ranks exchange heads"
_OWN_LOSS = "has no loss with shift_labels, which shards of a sequence require"
_SINKS = "has attention sinks per head, which stay on other ranks when heads are exchanged"
UNSHAREABLE_MODELS = (
    dict.fromkeys(("big_bird", "codegen", "diffllama", "doge", "falcon", "fuyu", "gpt_neo"), _OWN_ATTENTION)
    | dict.fromkeys(("hrm_text",), _OWN_ATTENTION)
    | dict.fromkeys(("gpt_neox_japanese", "gptj", "megatron-bert", "rembert", "xglm"), _OWN_ATTENTION)
    | dict.fromkeys(("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "bloom", "cpmant", "ctrl"), _OWN_LOSS)
    | dict.fromkeys(("gpt2", "marian", "mbart", "mpt", "mvp", "openai-gpt", "pegasus", "plbart", "roformer"), _OWN_LOSS)
    | dict.fromkeys(("trocr", "whisper", "xlm", "xlnet"), _OWN_LOSS)
    | dict.fromkeys(("deepseek_v4", "gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4", "mimo_v2_flash"), _SINKS)
)
"""Why other `model_type`s of transformers 5.17.0 do not support sequence parallelism."""
LENGTH_DEPENDENT_ROTATIONS = ("dynamic", "longrope")
"""`rope_type`s of Transformers (modeling_rope_utils.py, `dynamic_rope_update`)."""
WITHOUT_MASK = ("sdpa", "flash_attention_2", "flash_attention_3")
"""Attention implementations that compute causal attention without a mask."""


def sequence_parallel_errors(
    model: ModelTraits,
    layout: Layout,
    *,
    world_size: int,
    seq_len_tokens: int | None = None,
    offered_attention: Sequence[str] = WITHOUT_MASK,
) -> list[ConfigError]:
    """Return the errors of sequence parallelism over `layout.sp` ranks; none for a size of 1."""
    size = layout.sp
    if size == 1:
        return []
    if size < 1:
        return [ConfigError(where="sp", value=size, rule="must be at least 1", fix="use 1 to disable it")]
    errors = []
    if layout.engine != "deepspeed":
        rule = f"requires DeepSpeed (Ulysses), not {layout.engine}"
        errors.append(ConfigError(where="sp", value=size, rule=rule, fix="use a ZeRO stage, or cp with FSDP2"))
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    violations = [divides("sp", size, world_size, "the ranks"), divides("sp", size, heads, "the attention heads")]
    if kv_heads % size and size % kv_heads:
        rule = f"must divide the {kv_heads} key/value heads or be a multiple of them ({kv_heads} % {size} = "
        violations.append(ConfigError(where="sp", value=size, rule=f"{rule}{kv_heads % size})"))
    legal = [
        count
        for count in range(1, heads + 1)
        if world_size % count == heads % count == 0 and (kv_heads % count == 0 or count % kv_heads == 0)
    ]
    errors += [replace(error, fix=nearest(legal, size)) for error in violations if error is not None]
    errors += _length_errors("sp", size, seq_len_tokens)
    errors += attention_errors(attention=model.attention, offered=offered_attention)
    errors += _layer_errors(size, model)
    window, chunked = model.attention_window_tokens, "chunked_attention" in model.layer_types
    fits = window is not None and seq_len_tokens is not None and seq_len_tokens <= window
    if _is_windowed(model) and not fits and (chunked or model.attention == "sdpa"):
        rule = "cannot limit attention to a window: sequence parallelism drops the mask that expresses it"
        fix = "use sp = 1" if chunked else "use flash_attention_2"
        fix += "" if window is None else f", or sequences up to {window} tokens"
        errors.append(ConfigError(where="attn_implementation", value=model.attention, rule=rule, fix=fix))
    errors += rotation_errors(model.rope_type)
    others = [f"{name} = {layout.axes[name]}" for name in ("cp", "tp", "pp") if name in layout.axes]
    if others:
        rule = f"cannot be combined with {', '.join(others)}"
        errors.append(ConfigError(where="sp", value=size, rule=rule, fix="set one of them to 1"))
    return errors


def attention_errors(*, attention: str, offered: Sequence[str] = WITHOUT_MASK) -> list[ConfigError]:
    """Return the error of an attention implementation under sequence parallelism.

    `offered` are the implementations in `WITHOUT_MASK` that the model supports.
    """
    if attention in WITHOUT_MASK or ("/" in attention and "flash-attn" in attention):
        return []
    rule = "requires a mask for causal attention, which sequence parallelism drops"
    fix = f"load the model with attn_implementation={' or '.join(map(repr, offered))}"
    if not offered:
        fix = "use another model: this one supports no other implementation"
    return [ConfigError(where="attn_implementation", value=attention, rule=rule, fix=fix)]


def rotation_errors(rope_type: str) -> list[ConfigError]:
    """Return the error of rotary embeddings whose angles depend on the largest position, which differs per shard."""
    if rope_type not in LENGTH_DEPENDENT_ROTATIONS:
        return []
    rule = "has angles that depend on the last position of the full sequence, which a shard does not have"
    return [ConfigError(where="rope_type", value=rope_type, rule=rule, fix="use linear, yarn or llama3 scaling")]


def sample_errors(
    *, mask_dimensions: int, left_padded: bool, packed: bool, attention: str = "", samples: int = 1
) -> list[ConfigError]:
    """Return the errors of a batch of `samples` rows that ranks share, whose attention is causal and has no mask.

    Flash kernels read the borders of packed documents from the positions, in batches of one row only. `attention` is
    empty for context parallelism, which packs no documents.
    """
    errors = []
    if mask_dimensions > 2:
        rule = "must have at most 2 dimensions: ranks that share a sequence support no other masks"
        fix = "pass a [batch, sequence] mask with right padding, or no mask"
        errors.append(ConfigError(where="attention_mask", value=f"{mask_dimensions}-D", rule=rule, fix=fix))
    if left_padded:
        rule = "padding must follow the tokens: without a mask, tokens would attend to padding on their left"
        fix = "pad on the right (tokenizer.padding_side = 'right')"
        errors.append(ConfigError(where="attention_mask", value="left padding", rule=rule, fix=fix))
    if packed and not attention:
        rule, fix = "packed documents would attend to earlier documents", "put each document in a separate row"
        errors.append(ConfigError(where="position_ids", value="packed", rule=rule, fix=fix))
    elif packed and (attention == "sdpa" or samples > 1):
        rule = "packed rows require flash attention and micro-batches of one row"
        fix = "use flash_attention_2 with micro-batches of 1, or put each document in a separate row"
        value = f"packed, {attention}, {samples} rows"
        errors.append(ConfigError(where="position_ids", value=value, rule=rule, fix=fix))
    return errors


def _length_errors(axis: str, size: int, seq_len: int | None, *, factor: int = 1) -> list[ConfigError]:
    unit = factor * size
    if seq_len is None or seq_len % unit == 0:
        return []
    below = seq_len // unit * unit
    near = f"{below} or {below + unit}" if below else str(unit)
    name = axis if factor == 1 else f"{factor} * {axis}"
    rule = f"must be a multiple of {name} ({seq_len} % {unit} = {seq_len % unit})"
    return [ConfigError(where="seq_len", value=seq_len, rule=rule, fix=f"nearest legal values: {near}")]


def _layer_errors(size: int, model: ModelTraits) -> list[ConfigError]:
    errors = []
    other = sorted(set(model.layer_types) - FULL_ATTENTION - WINDOWED_ATTENTION)
    if other or model.model_type in RECURRENT_MODELS:
        kinds = ", ".join(other) or model.model_type
        rule = f"{kinds} layers carry a state or an index along the sequence, which would restart in every shard"
        errors.append(ConfigError(where="sp", value=size, rule=rule, fix="use sp = 1, or a model with full attention"))
    if model.model_type in UNSHAREABLE_MODELS:
        rule = f"{model.model_type} {UNSHAREABLE_MODELS[model.model_type]}"
        errors.append(ConfigError(where="sp", value=size, rule=rule, fix="use sp = 1, or another model"))
    if not model.has_equal_head_widths:
        rule = "requires equal key and value widths, but latent attention has wider keys"
        errors.append(ConfigError(where="sp", value=size, rule=rule, fix="use sp = 1"))
    return errors


def _is_windowed(model: ModelTraits) -> bool:
    if model.layer_types:
        return bool(WINDOWED_ATTENTION.intersection(model.layer_types))
    return model.attention_window_tokens is not None


OTHER_ATTENTION = frozenset(
    [
        *("bloom", "codegen", "ctrl", "dbrx", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox"),
        *("gpt_neox_japanese", "gptj", "jetmoe", "mpt", "openai-gpt"),
    ]
)
"""Families whose attention modules are not called `self_attn`: accelerate 1.15.0 removes the mask, which covers a part
of the sequence, only from modules of that name. GPT-2 fails in gloo with mismatched sizes."""


def context_parallel_errors(
    model: ModelTraits,
    layout: Layout,
    *,
    world_size: int,
    seq_len_tokens: int | None = None,
    names_self_attention: bool | None = None,
) -> list[ConfigError]:
    """Return the errors of ring attention over `layout.cp` ranks; none for a size of 1."""
    size = layout.cp
    if size == 1:
        return []
    if size < 1:
        return [ConfigError(where="cp", value=size, rule="must be at least 1", fix="use 1 to disable it")]
    ranks = divides("cp", size, world_size, "the ranks")
    errors = [] if ranks is None else [ranks]
    errors += _length_errors("cp", size, seq_len_tokens, factor=2)
    if layout.engine != "fsdp2":
        fix = "train with FSDP2 (--strategy fsdp2), or use sp with DeepSpeed"
        errors.append(ConfigError(where="cp", value=size, rule=f"requires FSDP2, not {layout.engine}", fix=fix))
    if layout.dp_replicate > 1 and layout.dp_shard == 1:
        rule = "with dp_replicate > 1 requires dp_shard > 1"
        fix = "use dp_replicate = 1 (--strategy fsdp2) or dp_shard > 1 (a smaller --context-parallel-size)"
        errors.append(ConfigError(where="cp", value=size, rule=rule, fix=fix))
    instead = "use cp = 1"
    if "chunked_attention" not in model.layer_types and not _layer_errors(2, model):
        instead += ", or sp with DeepSpeed" + (" and flash_attention_2" if _is_windowed(model) else "")
    if model.attention != "sdpa":
        fix = "load the model with attn_implementation='sdpa'"
        rule = "context parallelism requires torch's scaled_dot_product_attention"
        errors.append(ConfigError(where="attn_implementation", value=model.attention, rule=rule, fix=fix))
    other = sorted(set(model.layer_types) - FULL_ATTENTION)
    if other or model.model_type in RECURRENT_MODELS:
        kinds = ", ".join(other) or model.model_type
        rule = f"requires full causal attention, but the model has {kinds} layers"
        errors.append(ConfigError(where="cp", value=size, rule=rule, fix=instead))
    elif not model.layer_types and model.attention_window_tokens is not None:
        rule = f"requires full causal attention, but the model has a window of {model.attention_window_tokens} tokens"
        errors.append(ConfigError(where="cp", value=size, rule=rule, fix=instead))
    if not model.has_equal_head_widths:
        # SDPA would select its math kernel, whose mask does not match a rank's part of the sequence: torch fails.
        rule = "requires equal key and value widths, but latent attention has wider keys"
        errors.append(ConfigError(where="cp", value=size, rule=rule, fix="use cp = 1"))
    if names_self_attention is False or (names_self_attention is None and model.model_type in OTHER_ATTENTION):
        name = model.model_type or "the model"
        rule = f"requires attention modules named self_attn (accelerate), which {name} does not have"
        errors.append(ConfigError(where="cp", value=size, rule=rule, fix=instead))
    errors += rotation_errors(model.rope_type)
    others = [f"{name} = {layout.axes[name]}" for name in ("sp", "tp", "pp") if name in layout.axes]
    if others:
        rule = f"cannot be combined with {', '.join(others)}"
        errors.append(ConfigError(where="cp", value=size, rule=rule, fix="set one of them to 1"))
    return errors
