"""Faults of a model and of training arguments under sequence parallelism."""

from __future__ import annotations

import os
import sys
from typing import Any

from ....ds_configs.legality.sequence import (
    LENGTH_DEPENDENT_ROTATIONS,
    UNSHAREABLE_MODELS,
    WITHOUT_MASK,
    equal_head_widths,
    sequence_parallel_faults,
)
from ....ds_configs.specs.errors import Fault
from ....plugins.deepspeed.engine import train_batch_size
from ....plugins.transformers.training_arguments import deepspeed_configuration


def model_faults(model: Any, *, size: int, world_size: int, engine: str = "deepspeed") -> list[Fault]:
    """Return what forbids to train this Transformers model on shards of its sequences."""
    inner = base_model(model)
    config = inner.config
    text = config.get_text_config()
    # Models without attention have none, and a rule of their own.
    heads = getattr(text, "num_attention_heads", size)
    faults = sequence_parallel_faults(
        sequence_parallel_size=size,
        engine=engine,
        world_size=world_size,
        num_attention_heads=heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        attention=config._attn_implementation,
        model_type=text.model_type,
        layer_types=tuple(getattr(text, "layer_types", None) or ()),
        attention_window_tokens=attention_window(text),
        has_equal_head_widths=equal_head_widths(text.to_dict()),
        rope_type=rotation(text),
        offered_attention=_offered_attention(inner),
    )
    name = type(inner).__name__
    if text.model_type in UNSHAREABLE_MODELS:
        return faults
    if not _has_shared_attention(inner):
        rule = "computes attention past the registry of Transformers, where heads are exchanged"
        faults.append(Fault(where="model", value=name, rule=rule, fix="use sequence_parallel_size = 1"))
    if any(hasattr(module, "sinks") for module in inner.modules()):
        rule = "adds attention sinks of each head, which an exchange of heads leaves on other ranks"
        faults.append(Fault(where="model", value=name, rule=rule, fix="use sequence_parallel_size = 1"))
    if not _loses_on_shifted_labels(inner):
        rule = "must be a causal language model whose loss takes shift_labels"
        faults.append(Fault(where="model", value=name, rule=rule, fix="use an AutoModelForCausalLM model"))
    elif any(getattr(module, "is_causal", True) is False for module in inner.modules()):
        rule = "attends to both sides, and padding on the right is seen without a mask"
        faults.append(Fault(where="model", value=name, rule=rule, fix="use a decoder (is_decoder=True)"))
    if hasattr(config, "vision_config") or hasattr(config, "audio_config"):
        rule = "places images or sounds among its tokens, which cannot be cut into shards"
        faults.append(Fault(where="model", value=name, rule=rule, fix="train its text model"))
    if any(getattr(one, "is_prompt_learning", False) for one in getattr(model, "peft_config", {}).values()):
        rule = "adds virtual tokens in front of every shard"
        faults.append(Fault(where="peft", value="prompt learning", rule=rule, fix="use LoRA"))
    return faults


def base_model(model: Any) -> Any:
    """Return the Transformers model inside a PEFT model."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def argument_faults(arguments: Any, *, size: int, attention: str = "sdpa") -> list[Fault]:
    """Return what in `TrainingArguments` and in the DeepSpeed section contradicts sequence parallelism.

    `attention` is the model's implementation.
    """
    faults = []
    refused = {
        "average_tokens_across_devices": (False, "losses are means over the tokens of all ranks", "leave it out"),
        "train_sampling_strategy": ("batch_rebalance", "deals samples to ranks that read the same ones", "use random"),
        "eval_use_gather_object": (True, "gathers from every rank of a sequence", "leave it out"),
        "predict_with_generate": (True, "generates from whole prompts", "call model.generate on each rank"),
    }
    for name, (value, rule, fix) in refused.items():
        if getattr(arguments, name, None) == value:
            faults.append(Fault(where=f"training arguments: {name}", value=value, rule=rule, fix=fix))
    faults += reading_faults(arguments)
    configuration = deepspeed_configuration(arguments)
    if configuration is not None:
        faults += _section_faults(configuration, arguments, size)
    faults += _handler_faults(getattr(arguments, "parallelism_config", None), attention)
    return faults + parallelism_faults(arguments, {"sp": size, "cp": 1, "tp": 1, "dp_replicate": 1})


def _handler_faults(given: Any, attention: str) -> list[Fault]:
    """Return what a user's `sp_handler` says otherwise than the one that takes its place."""
    handler = getattr(given, "sp_handler", None)
    faults = []
    if getattr(handler, "sp_seq_length_is_variable", True) is False:
        rule, fix = "would fix the length of batches, which are padded here", "leave it out"
        faults.append(Fault(where="sp_handler.sp_seq_length_is_variable", value=False, rule=rule, fix=fix))
    named = getattr(handler, "sp_attn_implementation", None)
    if named not in (None, attention):
        rule, fix = f"contradicts the model, which was loaded with {attention!r}", "leave it out"
        faults.append(Fault(where="sp_handler.sp_attn_implementation", value=named, rule=rule, fix=fix))
    return faults


def reading_faults(arguments: Any) -> list[Fault]:
    """Return what in `TrainingArguments` contradicts that ranks read the same batches and compute on parts of them."""
    faults = []
    refused = {
        "split_batches": "splits a batch over ranks that read the same one",
        "dispatch_batches": "gives every rank a batch of its own from the first, and ranks of a sequence share one",
    }
    for name, rule in refused.items():
        if getattr(arguments.accelerator_config, name, None):
            faults.append(Fault(where=f"accelerator_config.{name}", value=True, rule=rule, fix="leave it out"))
    noise = getattr(arguments, "neftune_noise_alpha", None)
    if noise is not None:
        rule = "scales noise by the length of what a rank embeds, which is a part of the sequence"
        faults.append(Fault(where="neftune_noise_alpha", value=noise, rule=rule, fix="leave it out"))
    return faults


def _section_faults(configuration: dict[str, Any], arguments: Any, size: int) -> list[Fault]:
    faults = []
    own = configuration.get("sequence_parallel_size", size)
    if own != size:
        rule = f"contradicts sequence_parallel_size = {size} of the callback"
        faults.append(Fault(where="sequence_parallel_size", value=own, rule=rule, fix="leave the key out"))
    tensor = (configuration.get("tensor_parallel") or {}).get("autotp_size", 1)
    if tensor > 1:
        rule = "does not combine with sequence parallelism"
        faults.append(Fault(where="tensor_parallel.autotp_size", value=tensor, rule=rule, fix="leave the section out"))
    zero = configuration.get("zero_optimization") or {}
    if zero.get("stage", 0) == 3 and zero.get("reduce_scatter", True) is False:
        rule = "adds gradients of some parameters over a sequence and averages those of others (deepspeed 0.19.8)"
        faults.append(Fault(where="zero_optimization.reduce_scatter", value=False, rule=rule, fix="leave the key out"))
    total = configuration.get("train_batch_size", "auto")
    right = train_batch_size(arguments, size=size)
    # TrainingArguments has put the product with all ranks in the place of "auto".
    filled = right * size if getattr(arguments, "hf_deepspeed_config", None) is not None else right
    if total not in ("auto", right, filled):
        rule = f"must be micro-batch * accumulation * ranks / sp = {right}"
        faults.append(Fault(where="train_batch_size", value=total, rule=rule, fix=f"write {right} or 'auto'"))
    return faults


def parallelism_faults(arguments: Any, wanted: dict[str, int]) -> list[Fault]:
    """Return where a `parallelism_config`, of the arguments or of the launcher's environment, asks for other sizes."""
    given = getattr(arguments, "parallelism_config", None)
    sizes = {}
    if given is not None:
        sizes = {name: getattr(given, f"{name}_size", 1) for name in wanted}
    elif os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() in ("1", "true", "yes", "on"):
        sizes = {name: int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", "1")) for name in wanted}
    return [
        Fault(
            where=f"parallelism_config.{name}_size",
            value=found,
            rule=f"contradicts what is asked for here, which is {wanted[name]}",
            fix=f"write {wanted[name]}, or leave parallelism_config out",
        )
        for name, found in sizes.items()
        if found != wanted[name]
    ]


def attention_window(text: Any) -> int | None:
    """Return how many tokens a layer looks back; `None` for all."""
    if getattr(text, "use_sliding_window", True) is False:
        return None
    window = getattr(text, "sliding_window", None) or getattr(text, "attention_chunk_size", None)
    return window if isinstance(window, int) else None


def _offered_attention(inner: Any) -> tuple[str, ...]:
    """Return the attention implementations without a mask that a model's class says it has."""
    flash = getattr(inner, "_supports_flash_attn", True)
    return tuple(one for one in WITHOUT_MASK if (getattr(inner, "_supports_sdpa", True) if one == "sdpa" else flash))


def _has_shared_attention(inner: Any) -> bool:
    """Whether the code of a model looks its attention up where DeepSpeed puts its own."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    files = {type(module).__module__ for module in inner.modules()}
    registries = [getattr(sys.modules.get(file), "ALL_ATTENTION_FUNCTIONS", None) for file in files]
    found = [registry for registry in registries if registry is not None]
    return bool(found) and all(registry is ALL_ATTENTION_FUNCTIONS for registry in found)


def _loses_on_shifted_labels(inner: Any) -> bool:
    from inspect import Parameter, signature

    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    if inner.config.is_encoder_decoder or LOSS_MAPPING.get(getattr(inner, "loss_type", None)) is not ForCausalLMLoss:
        return False
    parameters = signature(type(inner).forward).parameters
    takes_any = any(one.kind is Parameter.VAR_KEYWORD for one in parameters.values())
    return takes_any and "position_ids" in parameters


def rotation(text: Any) -> str:
    """Return the kind of rotary embedding; where layers differ, one that shards cannot have comes first."""
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    sections = [rope, *(one for one in rope.values() if isinstance(one, dict))]
    kinds = [str(one.get("rope_type", one.get("type", ""))) for one in sections]
    return max(kinds, key=LENGTH_DEPENDENT_ROTATIONS.__contains__)
