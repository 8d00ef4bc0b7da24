"""Errors of a model and of training arguments under sequence parallelism."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from ....ds_configs.legality.axes import (
    LENGTH_DEPENDENT_ROTATIONS,
    UNSHAREABLE_MODELS,
    WITHOUT_MASK,
    sequence_parallel_errors,
)
from ....ds_configs.specs.errors import ConfigError
from ....ds_configs.specs.layout import Engine, Layout
from ....ds_configs.specs.model import ModelTraits, equal_head_widths
from ....plugins.deepspeed.engine import train_batch_size
from ....plugins.transformers.output_heads import accepts_shifted_labels, base_model
from ....plugins.transformers.training_arguments import deepspeed_configuration

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments


def traits_of(model: PreTrainedModel, size: int) -> ModelTraits:
    """Return what the rules of axes read of a loaded model.

    `size` replaces sizes that its configuration lacks: models without attention have no heads, and their own rule.
    """
    config = base_model(model).config
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None) or size
    window = getattr(text, "sliding_window", None) or getattr(text, "attention_chunk_size", None)
    attends_to_all = getattr(text, "use_sliding_window", True) is False or not isinstance(window, int)
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    sections = [rope, *(section for section in rope.values() if isinstance(section, dict))]
    rotations = [str(section.get("rope_type", section.get("type", ""))) for section in sections]
    return ModelTraits(
        model_type=text.model_type,
        num_attention_heads=heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        intermediate_size=getattr(text, "intermediate_size", None) or size,
        vocab_size=text.vocab_size,
        num_experts=getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None) or 0,
        attention=config._attn_implementation,
        layer_types=tuple(getattr(text, "layer_types", None) or ()),
        attention_window_tokens=None if attends_to_all else window,
        has_equal_head_widths=equal_head_widths(text.to_dict()),
        # If layers differ, one that does not work on shards.
        rope_type=max(rotations, key=LENGTH_DEPENDENT_ROTATIONS.__contains__),
    )


def model_errors(
    model: PreTrainedModel, *, size: int, world_size: int, engine: Engine = "deepspeed"
) -> list[ConfigError]:
    """Return why a model cannot be trained on shards of its sequences."""
    inner = base_model(model)
    config = inner.config
    text = config.get_text_config()
    flash, sdpa = getattr(inner, "_supports_flash_attn", True), getattr(inner, "_supports_sdpa", True)
    errors = sequence_parallel_errors(
        traits_of(model, size),
        Layout(engine=engine, sp=size),
        world_size=world_size,
        offered_attention=tuple(name for name in WITHOUT_MASK if (sdpa if name == "sdpa" else flash)),
    )
    name = type(inner).__name__
    if text.model_type in UNSHAREABLE_MODELS:
        return errors
    if not _has_shared_attention(inner):
        rule = "does not use Transformers' registry of attention functions, where heads are exchanged"
        errors.append(ConfigError(where="model", value=name, rule=rule, fix="use sequence_parallel_size = 1"))
    if any(hasattr(module, "sinks") for module in inner.modules()):
        rule = "has an attention sink per head, and the exchange of heads does not move it to the other ranks"
        errors.append(ConfigError(where="model", value=name, rule=rule, fix="use sequence_parallel_size = 1"))
    if not accepts_shifted_labels(inner):
        rule = "must be a causal language model whose loss takes shift_labels"
        errors.append(ConfigError(where="model", value=name, rule=rule, fix="use an AutoModelForCausalLM model"))
    elif any(getattr(module, "is_causal", True) is False for module in inner.modules()):
        rule = "attends to both sides, so without a mask it would attend to padding on the right"
        errors.append(ConfigError(where="model", value=name, rule=rule, fix="use a decoder (is_decoder=True)"))
    if hasattr(config, "vision_config") or hasattr(config, "audio_config"):
        rule = "places images or sounds among its tokens, which cannot be split into shards"
        errors.append(ConfigError(where="model", value=name, rule=rule, fix="train its text model"))
    if any(getattr(peft, "is_prompt_learning", False) for peft in getattr(model, "peft_config", {}).values()):
        rule = "adds virtual tokens to the start of every shard"
        errors.append(ConfigError(where="peft", value="prompt learning", rule=rule, fix="use LoRA"))
    return errors


def argument_errors(arguments: TrainingArguments, *, size: int, attention: str = "sdpa") -> list[ConfigError]:
    """Return what in `TrainingArguments` and the DeepSpeed section contradicts sequence parallelism.

    `attention` is the model's attention implementation.
    """
    errors = []
    rejected = {
        "average_tokens_across_devices": (False, "losses are means over the tokens of all ranks", "omit it"),
        "train_sampling_strategy": (
            "batch_rebalance",
            "gives different samples to the ranks of a sequence, which need the same samples",
            "use random",
        ),
        "eval_use_gather_object": (True, "gathers from every rank of a sequence", "omit it"),
        "predict_with_generate": (True, "generates from complete prompts", "call model.generate on each rank"),
    }
    for name, (value, rule, fix) in rejected.items():
        if getattr(arguments, name, None) == value:
            errors.append(ConfigError(where=f"training arguments: {name}", value=value, rule=rule, fix=fix))
    errors += reading_errors(arguments)
    configuration = deepspeed_configuration(arguments) or {}
    section_size = configuration.get("sequence_parallel_size", size)
    if section_size != size:
        rule = f"contradicts sequence_parallel_size = {size} of the callback"
        errors.append(ConfigError(where="sequence_parallel_size", value=section_size, rule=rule, fix="omit the key"))
    tensor = (configuration.get("tensor_parallel") or {}).get("autotp_size", 1)
    if tensor > 1:
        where, rule = "tensor_parallel.autotp_size", "cannot be combined with sequence parallelism"
        errors.append(ConfigError(where=where, value=tensor, rule=rule, fix="omit the section"))
    zero = configuration.get("zero_optimization") or {}
    if zero.get("stage", 0) == 3 and zero.get("reduce_scatter", True) is False:
        where = "zero_optimization.reduce_scatter"
        rule = "adds gradients of some parameters over a sequence and averages those of others (deepspeed 0.19.8)"
        errors.append(ConfigError(where=where, value=False, rule=rule, fix="omit the key"))
    total, right = configuration.get("train_batch_size", "auto"), train_batch_size(arguments, size=size)
    # TrainingArguments has replaced "auto" by the product with all ranks.
    filled = right * size if getattr(arguments, "hf_deepspeed_config", None) is not None else right
    if total not in ("auto", right, filled):
        rule = f"must be micro-batch * accumulation * ranks / sp = {right}"
        errors.append(ConfigError(where="train_batch_size", value=total, rule=rule, fix=f"write {right} or 'auto'"))
    handler = getattr(getattr(arguments, "parallelism_config", None), "sp_handler", None)
    if getattr(handler, "sp_seq_length_is_variable", True) is False:
        rule = "fixes the length of batches, which the callback pads"
        errors.append(ConfigError(where="sp_handler.sp_seq_length_is_variable", value=False, rule=rule, fix="omit it"))
    handler_attention = getattr(handler, "sp_attn_implementation", None)
    if handler_attention not in (None, attention):
        where, rule = "sp_handler.sp_attn_implementation", f"contradicts the model, which was loaded with {attention!r}"
        errors.append(ConfigError(where=where, value=handler_attention, rule=rule, fix="omit it"))
    return errors + parallelism_errors(arguments, {"sp": size, "cp": 1, "tp": 1, "dp_replicate": 1})


def reading_errors(arguments: TrainingArguments) -> list[ConfigError]:
    """Return what in `TrainingArguments` does not combine with ranks that read the same batches and share them."""
    errors = []
    rejected = {
        "split_batches": "splits a batch over the ranks of a sequence, which need the same batch",
        "dispatch_batches": "sends different batches from the first rank, but ranks of a sequence need the same batch",
    }
    for name, rule in rejected.items():
        if getattr(arguments.accelerator_config, name, None):
            errors.append(ConfigError(where=f"accelerator_config.{name}", value=True, rule=rule, fix="omit it"))
    noise = getattr(arguments, "neftune_noise_alpha", None)
    if noise is not None:
        rule = "scales noise by the length that a rank embeds, which is only a shard of the sequence"
        errors.append(ConfigError(where="neftune_noise_alpha", value=noise, rule=rule, fix="omit it"))
    return errors


def parallelism_errors(arguments: TrainingArguments, required: dict[str, int]) -> list[ConfigError]:
    """Return where `parallelism_config`, or the launcher's environment, sets other sizes than the required ones."""
    axes = getattr(arguments, "parallelism_config", None)
    sizes = {}
    if axes is not None:
        sizes = {name: getattr(axes, f"{name}_size", 1) for name in required}
    elif os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() in ("1", "true", "yes", "on"):
        sizes = {name: int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", "1")) for name in required}
    return [
        ConfigError(
            where=f"parallelism_config.{name}_size",
            value=size,
            rule=f"contradicts the requested size {required[name]}",
            fix=f"write {required[name]}, or omit parallelism_config",
        )
        for name, size in sizes.items()
        if size != required[name]
    ]


def _has_shared_attention(inner: PreTrainedModel) -> bool:
    """Return whether the model's code looks attention up in the registry where DeepSpeed registers its own."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    files = {type(module).__module__ for module in inner.modules()}
    registries = [getattr(sys.modules.get(file), "ALL_ATTENTION_FUNCTIONS", None) for file in files]
    used = [registry for registry in registries if registry is not None]
    return bool(used) and all(registry is ALL_ATTENTION_FUNCTIONS for registry in used)
