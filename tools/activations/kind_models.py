"""Small models of a family that mix kinds of layers, and one metered training step of each."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import transformers
from shardwright.ds_configs.memory.activations import Adapter, Mode, feature_factors, image_factors
from shardwright.ds_configs.specs.images import image_part
from shardwright.ds_configs.specs.model import ModelSpec
from shardwright.plugins.transformers.meta_model import model_spec_from_meta
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.initialization import no_init_weights
from transformers.modeling_layers import GradientCheckpointingLayer

from .families import attention_kernel
from .image_sizes import SPECIAL_TOKENS, Image
from .kind_families import KIND_FAMILIES, KindFamily
from .kind_sizes import Values
from .liger import with_liger_layers
from .linear_attention import linear_attention_kernels
from .run import TracedStep, enable_checkpointing, trace_training_step

_LORA: tuple[Adapter, ...] = ("lora_all_linear", "lora_experts", "lora_language", "lora_full_tower")
_LORA_OF_TEXT = ("lora_language", "lora_full_tower")
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
    images: tuple[tuple[Image, ...], ...] = ()
    """Images of each sequence; empty for text alone."""

    @property
    def factors(self) -> dict[str, int]:
        """Factors of the images of the micro-batch."""
        images = [image for sequence in self.images for image in sequence]
        return image_factors(
            images=sum(image.tiles for image in images),
            patches=sum(image.rows * image.columns for image in images),
            tokens=sum(image.tokens for image in images),
        )


def config_at(architecture: str, values: Values, depths: Mapping[str, int]) -> dict[str, Any]:
    """Return a `config.json` of the family with layers of each kind."""
    family = KIND_FAMILIES[architecture]
    return {
        "model_type": family.model_type,
        "architectures": [architecture.partition(" ")[0]],
        **family.depth(values, depths),
    }


def drawn_shapes(architecture: str, count: int, *, adapter: Adapter, seed: int = 20) -> list[KindShape]:
    """Draw shapes whose sizes vary independently; token counts are no multiples of 8, as the widths are."""
    choose, family = random.Random(f"{architecture} {seed}"), KIND_FAMILIES[architecture]
    shapes: list[KindShape] = []
    while len(shapes) < count:
        shape = KindShape(
            values=family.sizes(choose),
            micro_batch_size=choose.choice([2, 3, 5, 6]),
            seq_len_tokens=choose.choice(family.lengths),
            lora_rank=choose.choice(_LORA_RANKS) if adapter in _LORA else 0,
        )
        if family.image:
            image, sequences = family.image(choose, shape.values), range(shape.micro_batch_size)
            # Padding would be a further size.
            equal = [*sequences] * choose.randint(1, 2) if family.inputs == "padded images" else None
            places = equal or choose.choices(sequences, k=2)
            shape = with_images(shape, [[image] * places.count(place) for place in range(shape.micro_batch_size)])
        tokens = shape.micro_batch_size * shape.seq_len_tokens
        # What routed tokens keep must not look like a weight's gradient either.
        if not {tokens, tokens * shape.values.get("num_experts_per_tok", 1)} & _integers(shape.values):
            shapes.append(shape)
    return shapes


def with_images(shape: KindShape, images: Sequence[Sequence[Image]]) -> KindShape:
    """Return a shape with images in each sequence, whose tokens are added to those of the text."""
    tokens = max(sum(image.tokens + 1 for image in sequence) for sequence in images)
    # Still no multiple of 8.
    length = shape.seq_len_tokens + tokens + tokens % 2
    return replace(shape, images=tuple(tuple(sequence) for sequence in images), seq_len_tokens=length)


def shape_factors(architecture: str, shape: KindShape) -> dict[str, int]:
    """Return the sizes of a shape whose products are features."""
    factors = feature_factors(
        specification(architecture, shape),
        micro_batch_size=shape.micro_batch_size,
        seq_len_tokens=shape.seq_len_tokens,
        lora_rank=shape.lora_rank,
    )
    return factors | shape.factors


def _integers(values: Values) -> set[int]:
    return {value for value in values.values() if isinstance(value, int)}


def specification(architecture: str, shape: KindShape) -> ModelSpec:
    """Return what a plan knows of a shape with few layers of each kind."""
    return _specification(architecture, json.dumps(shape.values))


@cache
def _specification(architecture: str, values: str) -> ModelSpec:
    family = KIND_FAMILIES[architecture]
    depths = dict.fromkeys(family.kinds, family.shallow_layers)
    return model_spec_from_meta(config_at(architecture, json.loads(values), depths), name=architecture)


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
    if attention == "masked" and "sliding" in KIND_FAMILIES[architecture].kinds:
        # Shorter than every sequence.
        config["sliding_window"] = 4
    built = transformers.AutoConfig.for_model(**config)
    built.use_cache = False
    built._attn_implementation = "eager" if attention == "eager" else "sdpa"
    # What the weights of a dense model are changes no bytes.
    with no_init_weights() if KIND_FAMILIES[architecture].image else nullcontext():
        model: Any = getattr(transformers, config["architectures"][0])(built)
    family = KIND_FAMILIES[architecture]
    language = family.kinds[family.text_kinds[0]].split(".layers.")[0]
    if adapter == "frozen_tower":
        head = set(model.get_output_embeddings().parameters())
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(language) or parameter in head)
    of_experts = adapter == "lora_experts"
    if adapter in _LORA:
        from peft import LoraConfig, get_peft_model

        linear = [
            name
            for name, module in model.named_modules()
            if name.startswith(language) and isinstance(module, torch.nn.Linear)
        ]

        # As in `families.py`: PEFT holds adapters in float32 where the base is 16-bit under autocast.
        rank, experts = shape.lora_rank, ["experts.gate_up_proj", "experts.down_proj"]
        model = get_peft_model(
            model.bfloat16(),
            # A scale of one would skip an operator.
            LoraConfig(
                r=rank,
                lora_alpha=2 * rank,
                target_modules=linear if adapter in _LORA_OF_TEXT else [] if of_experts else "all-linear",
                target_parameters=experts if of_experts else None,
                lora_dropout=0.0,
            ),
        )
        if of_experts:
            # As if an earlier layer were adapted too: all layers compute gradients of their inputs.
            model.enable_input_require_grads()
    if adapter == "lora_full_tower":
        for name, parameter in model.named_parameters():
            if image_part(name):
                parameter.requires_grad_(True)
    if adapter not in _LORA or mode != "bf16_autocast":
        # Not `to`, which would make real numbers of Llama 4's complex rotations.
        model = model.bfloat16() if mode == "bf16" else model.float()
    model.train()
    if adapter == "none_liger":
        model = with_liger_layers(model)
    if checkpointing:
        enable_checkpointing(model)
        if adapter in _LORA_OF_TEXT:
            # As TRL and PEFT do. It also hooks the embedding of patches, so that a frozen tower keeps its checkpoints.
            model.enable_input_require_grads()
    return model


def model_inputs(architecture: str, shape: KindShape, model: Any) -> dict[str, torch.Tensor]:
    """Return random inputs with labels, none of them padded."""
    family, config = KIND_FAMILIES[architecture], model.config
    batch = shape.micro_batch_size
    found: dict[str, Any] = {}
    element = next(p.dtype for p in model.parameters() if p.is_floating_point())
    if family.image or "text" in family.inputs:
        words = config.get_text_config().vocab_size - SPECIAL_TOKENS
        found["input_ids"] = torch.randint(3, words, (batch, shape.seq_len_tokens))
    if family.image:
        types = _token_types(shape)
        found["input_ids"][types == 1] = config.image_token_id
        found |= _pixels(family, config.vision_config, shape.images)
        if family.image_mask:
            found[family.image_mask] = types
    elif family.inputs in ("image", "image and text"):
        vision = getattr(config, "vision_config", config)
        found["pixel_values"] = torch.randn(batch, vision.num_channels, vision.image_size, vision.image_size)
    if family.inputs == "sound":
        found["input_features"] = torch.randn(batch, config.num_mel_bins, 2 * config.max_source_positions)
    found = {name: value.to(element) if value.is_floating_point() else value for name, value in found.items()}
    if family.inputs == "image" or family.labels != "text":
        sizes = (batch, shape.seq_len_tokens) if family.labels == "token" else (batch,)
        found["labels"] = torch.randint(0, config.num_labels, sizes)
    elif family.inputs == "image and text":
        found["return_loss"] = True
    else:
        found["labels"] = torch.randint(3, config.get_text_config().vocab_size - 1, (batch, shape.seq_len_tokens))
    return found


def _token_types(shape: KindShape) -> torch.Tensor:
    """Return 1 for each token of an image, 0 for text, of which a token separates images."""
    types = torch.zeros(shape.micro_batch_size, shape.seq_len_tokens, dtype=torch.int64)
    for row, images in zip(types, shape.images, strict=False):
        start = 1
        for image in images:
            row[start : start + image.tokens] = 1
            start += image.tokens + 1
    return types


def _pixels(family: KindFamily, vision: Any, by_sequence: Sequence[Sequence[Image]]) -> dict[str, torch.Tensor]:
    images = [image for sequence in by_sequence for image in sequence]
    if not images:
        return {}
    if family.inputs == "patches":
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        return {
            "pixel_values": torch.randn(sum(image.rows * image.columns for image in images), width),
            "image_grid_thw": torch.tensor([(1, image.rows, image.columns) for image in images]),
        }
    side = vision.patch_size if isinstance(vision.patch_size, int) else vision.patch_size[0]
    if family.inputs == "tiles":
        pixels = torch.randn(len(images), images[0].tiles, vision.num_channels, vision.image_size, vision.image_size)
        return {"pixel_values": pixels, "image_sizes": torch.tensor([image.sides for image in images])}
    sizes = torch.tensor([(side * image.rows, side * image.columns) for image in images])
    pixels = torch.randn(len(images), vision.num_channels, *sizes.max(0).values.tolist())
    if family.inputs == "padded images":
        of_sequences = pixels.split([len(sequence) for sequence in by_sequence])
        pixels = torch.nn.utils.rnn.pad_sequence(list(of_sequences), batch_first=True)
    return {"pixel_values": pixels} | ({"image_sizes": sizes} if family.inputs == "sized images" else {})


def run_shape(
    architecture: str,
    shape: KindShape,
    depths: Mapping[str, int],
    *,
    mode: Mode,
    adapter: Adapter,
    attention: str,
    checkpointing: bool,
    whole: bool = True,
) -> TracedStep:
    """Meter one training step of one shape; without `whole`, what loops over sequences free is not metered."""
    model = build_model(
        architecture, shape, depths, mode=mode, adapter=adapter, checkpointing=checkpointing, attention=attention
    )
    base = model.get_base_model() if adapter in _LORA else model
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    family = KIND_FAMILIES[architecture]
    runs_tower = not family.image or any(shape.images)
    layers = _layers_as_they_run(base, family, runs_tower=runs_tower)
    if family.image and runs_tower and attention == "math":
        # A tower has as many heads of keys as of queries, and keeps its fused kernel.
        for layer in layers[: sum(depth for kind, depth in depths.items() if image_part(family.kinds[kind]))]:
            layer.forward = sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])(layer.forward)
    with attention_kernel(attention), linear_attention_kernels(base):
        return trace_training_step(
            model,
            model_inputs(architecture, shape, base),
            mode=mode,
            layers=layers,
            head=head,
            unmetered=[] if whole else [(base.base_model, name) for name in family.loops_over_sequences],
        )


def _layers_as_they_run(model: Any, family: KindFamily, *, runs_tower: bool) -> list[torch.nn.Module]:
    """Return the layers in the order of execution; stacks of a model may stand in another one."""
    layers = {n: module for n, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)}
    if family.interleaved or len(family.kinds) == 1:
        return [layer for name, layer in layers.items() if runs_tower or not image_part(name)]
    stacks = [parameter.split(".*.")[0] + "." for parameter in family.kinds.values()][0 if runs_tower else -1 :]
    return [layers[name] for stack in dict.fromkeys(stacks) for name in layers if name.startswith(stack)]
