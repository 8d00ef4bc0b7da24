"""Small models of a family that mix kinds of layers, and one metered training step of each."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from shardwright.ds_configs.memory.activations import Adapter, Mode
from shardwright.ds_configs.specs.model import ModelSpec
from shardwright.plugins.transformers.meta_model import model_spec_from_meta
from transformers.modeling_layers import GradientCheckpointingLayer

from .families import attention_kernel
from .fit import SHALLOW_LAYERS
from .kind_families import KIND_FAMILIES, KindFamily
from .kind_sizes import Values
from .run import TracedStep, enable_checkpointing, trace_training_step

# No batch size: an adapter's matrix would look like one vector of each sequence.
_LORA_RANKS = (4, 8, 12, 16)


@dataclass(frozen=True, kw_only=True)
class KindShape:
    """One traced case."""

    values: Values
    """Sizes in the configuration, without depths."""
    micro_batch_size: int
    """Sequences, or images."""
    seq_len_tokens: int
    """Tokens of each text."""
    lora_rank: int
    """Rank of the adapters; 0 without."""


def config_at(architecture: str, values: Values, depths: Mapping[str, int]) -> dict[str, Any]:
    """Return a `config.json` of the family with layers of each kind."""
    family = KIND_FAMILIES[architecture]
    return {"model_type": family.model_type, "architectures": [architecture], **family.depth(values, depths)}


def drawn_shapes(architecture: str, count: int, *, adapter: Adapter, seed: int = 20) -> list[KindShape]:
    """Draw shapes whose sizes vary independently; token counts are no multiples of 8, as the widths are."""
    choose, family = random.Random(f"{architecture} {seed}"), KIND_FAMILIES[architecture]
    shapes: list[KindShape] = []
    while len(shapes) < count:
        shape = KindShape(
            values=family.sizes(choose),
            micro_batch_size=choose.choice([2, 3, 5, 6]),
            seq_len_tokens=choose.choice([9, 11, 13, 15, 17, 19, 21, 23]),
            lora_rank=0 if adapter == "none" else choose.choice(_LORA_RANKS),
        )
        tokens = shape.micro_batch_size * shape.seq_len_tokens
        # What routed tokens keep must not look like a weight's gradient either.
        if not {tokens, tokens * shape.values.get("num_experts_per_tok", 1)} & _integers(shape.values):
            shapes.append(shape)
    return shapes


def _integers(values: Values) -> set[int]:
    return {value for value in values.values() if isinstance(value, int)}


def specification(architecture: str, shape: KindShape) -> ModelSpec:
    """Return what a plan knows of a shape, two layers of each kind deep."""
    depths = dict.fromkeys(KIND_FAMILIES[architecture].kinds, SHALLOW_LAYERS)
    return model_spec_from_meta(config_at(architecture, shape.values, depths), name=architecture)


def build_model(
    architecture: str,
    shape: KindShape,
    depths: Mapping[str, int],
    *,
    mode: Mode,
    adapter: Adapter = "none",
    checkpointing: bool = False,
    attention: str = "fused",
) -> Any:
    """Build one randomly initialised model in training mode, with adapters and checkpointing as asked."""
    config = config_at(architecture, shape.values, depths)
    built = transformers.AutoConfig.for_model(**config)
    built.use_cache = False
    built._attn_implementation = "eager" if attention == "eager" else "sdpa"
    model: Any = getattr(transformers, architecture)(built)
    if adapter != "none":
        from peft import LoraConfig, get_peft_model

        # As in `families.py`: PEFT holds adapters in float32 where the base is 16-bit under autocast.
        rank = shape.lora_rank
        model = get_peft_model(
            model.to(torch.bfloat16),
            # A scale of one would skip an operator.
            LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", lora_dropout=0.0),
        )
    if adapter == "none" or mode != "bf16_autocast":
        model = model.to(torch.bfloat16 if mode == "bf16" else torch.float32)
    model.train()
    if checkpointing:
        enable_checkpointing(model)
    return model


def model_inputs(architecture: str, shape: KindShape, model: Any) -> dict[str, torch.Tensor]:
    """Return random inputs with labels, none of them padded."""
    family, config = KIND_FAMILIES[architecture], model.config
    batch = shape.micro_batch_size
    found: dict[str, Any] = {}
    element = next(p.dtype for p in model.parameters() if p.is_floating_point())
    if "text" in family.inputs:
        words = config.get_text_config().vocab_size
        found["input_ids"] = torch.randint(3, words - 1, (batch, shape.seq_len_tokens))
    if "image" in family.inputs:
        vision = getattr(config, "vision_config", config)
        found["pixel_values"] = torch.randn(batch, vision.num_channels, vision.image_size, vision.image_size)
    if family.inputs == "sound":
        found["input_features"] = torch.randn(batch, config.num_mel_bins, 2 * config.max_source_positions)
    if family.inputs == "image in text":
        found["token_type_ids"] = torch.zeros_like(found["input_ids"])
        image = slice(config.mm_tokens_per_image)
        found["input_ids"][:, image], found["token_type_ids"][:, image] = config.image_token_id, 1
    found = {name: value.to(element) if value.is_floating_point() else value for name, value in found.items()}
    if family.inputs == "image" or family.labels != "text":
        sizes = (batch, shape.seq_len_tokens) if family.labels == "token" else (batch,)
        found["labels"] = torch.randint(0, config.num_labels, sizes)
    elif family.inputs == "image and text":
        found["return_loss"] = True
    else:
        found["labels"] = torch.randint(3, config.get_text_config().vocab_size - 1, (batch, shape.seq_len_tokens))
    return found


def run_shape(
    architecture: str,
    shape: KindShape,
    depths: Mapping[str, int],
    *,
    mode: Mode,
    adapter: Adapter,
    attention: str,
    checkpointing: bool,
) -> TracedStep:
    """Meter one training step of one shape."""
    model = build_model(
        architecture, shape, depths, mode=mode, adapter=adapter, checkpointing=checkpointing, attention=attention
    )
    base = model.get_base_model() if adapter != "none" else model
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    layers = _layers_as_they_run(base, KIND_FAMILIES[architecture], depths)
    with attention_kernel(attention):
        return trace_training_step(model, model_inputs(architecture, shape, base), mode=mode, layers=layers, head=head)


def _layers_as_they_run(model: Any, family: KindFamily, depths: Mapping[str, int]) -> list[torch.nn.Module]:
    """Return the layers in the order of execution; stacks of a model may stand in another one."""
    layers = {n: module for n, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)}
    if family.interleaved or len(family.kinds) == 1:
        return list(layers.values())
    stacks = [parameter.split(".*.")[0] + "." for parameter in family.kinds.values()]
    return [layers[name] for stack in dict.fromkeys(stacks) for name in layers if name.startswith(stack)]
