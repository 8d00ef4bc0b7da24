"""Load the model that training or evaluation starts from: its configuration, weights, tokenizer and other files.

Weights are read only from safetensors, and code in a model repository never runs.
"""

from __future__ import annotations

import json
import shutil
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ...ds_configs.specs.errors import ConfigError, UsageError
from ...plugins.bitsandbytes import is_divided, keep_layout, on_host, place_for_division
from ...plugins.huggingface_hub import TOKENIZER_FILES, model_directory
from ...plugins.launching.messages import note_on_first_rank
from ...plugins.peft import four_bit_loading
from ...plugins.safetensors import INDEX
from ...plugins.transformers.loading import (
    auto_class,
    check_config,
    check_weights,
    load_causal_lm,
    refuse_other_formats,
    refused_by_name,
)
from ...plugins.transformers.training_arguments import byte_tokenizer
from .images import reads_max_pixels
from .sources import DataSettings

CHAT_TEMPLATE = "chat_template.jinja"
"""File of a chat template, which takes precedence over one in `tokenizer_config.json`."""
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    CHAT_TEMPLATE,
    "processor_config.json",
    "preprocessor_config.json",
    "generation_config.json",
)
"""Tokenizer, processors and generation settings."""

PROBE_TEXT = "Ünïcode, 日本語 and 🤗: x = {'a': 1};\n\tif x != 0:  return [3.14, -2]\n"

Kind = TypeVar("Kind", bound=DataSettings)


@dataclass(frozen=True, kw_only=True, slots=True)
class StartingModel:
    """Origin of a model."""

    model: str
    """Hub id, local directory, or `config.json`."""
    revision: str | None = None
    """Branch, tag or commit of a Hub model; `None` for the newest commit of its main branch."""
    random_weights: bool = False
    method: str = "full"
    """`full`, `lora` or `qlora`, which loads weights in 4 bits."""


def load_config(source: StartingModel) -> Any:
    """Read the model configuration, without running code of the repository.

    Raises:
        RefusedInputError: it is damaged, has absurd values or requires code.
    """
    from transformers import AutoConfig

    directory = model_directory(source.model, revision=source.revision, weights=False)
    check_config(str(directory))
    with refused_by_name(source.model):
        config = AutoConfig.from_pretrained(str(directory), trust_remote_code=False)
    if not Path(source.model).expanduser().exists():
        config._name_or_path, config._commit_hash = source.model, directory.name
    return config


def load_model(
    source: StartingModel,
    config: Any,
    dtype: Any,
    seed: int,
    *,
    engine: str | None = None,
    for_stages: bool = False,
    score_head: bool = False,
) -> Any:
    """Load or initialise the model; under ZeRO-3 the weights are partitioned while they are created.

    4-bit weights that the `engine` shards are loaded into host memory first. With `for_stages`, the stages of a
    pipeline load the weights where possible: the result is then the name of a checkpoint, or a model without memory.
    With a `score_head` the model returns a score per sequence; a checkpoint without one gets a random head. The
    `config` then has one label.

    Raises:
        RefusedInputError: a local directory has weights in another format than safetensors.
        UsageError: 4-bit weights are requested, but there are none to load.
    """
    import torch
    from transformers import set_seed

    set_seed(seed)
    path = Path(source.model)
    random_weights = source.random_weights or path.is_file()
    # An index without shards means damaged weights, which are rejected with an error below.
    if path.is_dir() and not random_weights and not (any(path.glob("*.safetensors")) or (path / INDEX).exists()):
        refuse_other_formats(path, where="model", fix="convert them to safetensors, or pass its config.json")
        note_on_first_rank(f"{path} has no weights: they are initialised at random")
        random_weights = True
    if random_weights and source.method == "qlora":
        raise UsageError(ConfigError(where="--method", value="qlora", rule="quantizes loaded weights", fix="use lora"))
    if score_head:
        config.num_labels = 1
    if random_weights:
        kind = auto_class(config, score_head=score_head)
        with torch.device("meta") if for_stages else nullcontext():
            return kind.from_config(config, dtype=dtype, trust_remote_code=False)
    if for_stages and source.method == "full":
        path = model_directory(source.model, revision=source.revision)
        check_weights(path)
        return str(path)
    divided = source.method == "qlora" and is_divided(engine)
    host: AbstractContextManager[dict[str, Any]] = on_host() if divided else nullcontext({})
    with host as placement:
        model = load_causal_lm(
            source.model,
            # The weights are checked when training begins, where --allow-nonfinite is known.
            allow_nonfinite=True,
            revision=source.revision,
            config=config,
            dtype=dtype,
            score_head="new" if score_head else "none",
            quantization_config=four_bit_loading(dtype) if source.method == "qlora" else None,
            **placement,
        )
    model = keep_layout(model) if source.method == "qlora" else model
    return place_for_division(model) if divided else model


def has_tokenizer(directory: Path) -> bool:
    return any((directory / name).is_file() for name in TOKENIZER_FILES)


def copy_companions(source: Path, target: Path) -> None:
    """Copy tokenizer, processors and generation settings."""
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def load_tokenizer(source: StartingModel, vocab_size: int) -> Any:
    """Return the model's tokenizer, or a byte tokenizer if a local model has none.

    Raises:
        UsageError: the tokenizer produces ids for which the model has no embedding.
    """
    from transformers import AutoTokenizer

    path = Path(source.model)
    if path.exists() and not has_tokenizer(path):
        note_on_first_rank(f"{path} has no tokenizer: text is split into bytes")
        return byte_tokenizer(vocab_size)
    directory = model_directory(str(path), revision=source.revision, weights=False)
    tokenizer = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False)
    tokenizer.name_or_path = str(path)
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocab_size:
        rule = f"its ids must be below the model's vocab_size = {vocab_size}, but the largest is {largest}"
        raise UsageError(ConfigError(where="tokenizer", value=str(path), rule=rule))
    return tokenizer


_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")


def load_processor(source: StartingModel, config: Any, tokenizer: Any, max_pixels: int | None = None) -> Any:
    """Return the processor of a model that reads images, with this tokenizer; `None` for others, and without its files.

    `max_pixels` is the largest area of a resized image.

    Raises:
        UsageError: the processor is of another model, not supported, or has no such limit; or a package is missing.
        RefusedInputError: it cannot be loaded.
    """
    from transformers import AutoModelForImageTextToText, AutoProcessor, ProcessorMixin, __version__

    if auto_class(config) is not AutoModelForImageTextToText or Path(source.model).is_file():
        return None
    directory = model_directory(source.model, revision=source.revision, weights=False)
    if not any((directory / name).is_file() for name in _PROCESSOR_FILES):
        return None
    limit = {} if max_pixels is None else {"max_pixels": max_pixels}
    try:
        with refused_by_name(f"processor of {source.model}"):
            processor = AutoProcessor.from_pretrained(str(directory), trust_remote_code=False, **limit)
    except ImportError as error:
        package = next((name for name in ("torchvision", "pillow") if name in str(error).lower()), "pillow")
        rule, fix = f"the processor needs the package {package}, which is not installed", f"pip install {package}"
        raise UsageError(ConfigError(where="model", value=source.model, rule=rule, fix=fix)) from None
    if not isinstance(processor, ProcessorMixin):
        rule = f"its processor has a class that is not in Transformers {__version__}"
        fix = "pip install -U transformers, or save the processor of the model with this release"
        raise UsageError(ConfigError(where="model", value=source.model, rule=rule, fix=fix))
    kind, errors = type(processor).__name__, []
    if type(processor).replace_image_token is ProcessorMixin.replace_image_token:
        rule = "is not supported: it does not replace a token by those of an image"
        fix = "train with your own script: shardwright launch"
        raise UsageError(ConfigError(where="processor", value=kind, rule=rule, fix=fix))
    images, vision = processor.image_processor, getattr(config, "vision_config", None)
    if max_pixels is not None and not reads_max_pixels(processor):
        rule = f"is not an argument of {type(images).__name__}, which resizes images to its own sizes"
        errors.append(ConfigError(where="max_pixels", value=max_pixels, rule=rule, fix="omit it"))
    token, pairs = getattr(config, "image_token_id", None), {}
    if token not in (None, *processor.image_token_ids):
        pairs["the token of an image"] = (processor.image_token_ids[0], token)
    for name, own in (("patch_size", "patch_size"), ("merge_size", "spatial_merge_size")):
        read = getattr(processor, name, None) or getattr(images, name, None)
        pairs[name] = (read, getattr(vision, own, None))
    tower, side = getattr(vision, "model_type", None), getattr(vision, "image_size", None)
    # Processors that older releases saved lack these: LLaVA's would make another number of tokens, or none.
    for name, unset, expected in (
        ("patch_size", "not set", getattr(vision, "patch_size", None)),
        ("vision_feature_select_strategy", "full", getattr(config, "vision_feature_select_strategy", None)),
        ("num_additional_image_tokens", 0, {"clip_vision_model": 1, "siglip_vision_model": 0}.get(str(tower))),
    ):
        if hasattr(processor, name):
            pairs[name] = (getattr(processor, name) or unset, expected)
    # Pixtral's tower reads any size.
    if (
        config.model_type in ("llava", "vipllava", "paligemma", "deepseek_vl", "gemma3")
        and tower != "pixtral"
        and isinstance(side, int)
    ):
        from PIL import Image

        with refused_by_name(f"processor of {source.model}"):
            # Neither square, nor so wide that Gemma's processor may add crops.
            pixels = images(Image.new("RGB", (100, 90)), return_tensors="pt")["pixel_values"]
        pairs["image_size"] = (tuple(pixels.shape[-2:]), (side, side))
    for name, (read, expected) in pairs.items():
        if read is not None and expected is not None and read != expected:
            rule = f"is of another model or release: {name} is {read!r}, and the model has {expected!r}"
            fix = "save the processor of the model beside it"
            fix += f', or write "{name}": {json.dumps(expected)} in its JSON' if hasattr(processor, name) else ""
            errors.append(ConfigError(where="processor", value=kind, rule=rule, fix=fix))
    if errors:
        raise UsageError(errors)
    tokenizer.chat_template = processor.chat_template or tokenizer.chat_template
    processor.tokenizer = tokenizer
    return processor


def agreed_vocab_size(
    own_tokenizer: Any,
    other_tokenizer: Any,
    *,
    roles: tuple[str, str],
    fix: str = "use models of one family",
) -> int:
    """Return the number of ids of two equal tokenizers, one more than the largest id.

    Models may have wider heads, whose further rows belong to no token.

    Raises:
        UsageError: the tokenizers differ; reports the first difference.
    """
    tokenizers = (own_tokenizer, other_tokenizer)
    own, other = ({index: token for token, index in tokenizer.get_vocab().items()} for tokenizer in tokenizers)
    first = next((index for index in sorted(own.keys() | other.keys()) if own.get(index) != other.get(index)), None)
    split = [tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"] for tokenizer in tokenizers]
    if first is not None:
        rule = f"token {first} is {own.get(first)!r} for the {roles[0]} and {other.get(first)!r} for the {roles[1]}"
    elif split[0] != split[1]:
        rule = f"{roles[0]} and {roles[1]} split a text differently, into {len(split[0])} and {len(split[1])} tokens"
    else:
        return int(max(own)) + 1
    raise UsageError(ConfigError(where="tokenizer", rule=rule, fix=fix))


def with_positions(settings: Kind, *configs: Any) -> Kind:
    """Return settings whose sequence length all models support; a default length is shortened.

    Raises:
        UsageError: an explicitly set length exceeds the position embedding of a model.
    """
    if "seq_len" in settings.model_fields_set:
        for config in configs:
            check_seq_len(settings.seq_len, config)
        return settings
    limits = [limit for config in configs if (limit := positions_of(config)) is not None]
    most = min([settings.seq_len, *limits])
    if most == settings.seq_len:
        return settings
    note_on_first_rank(f"--seq-len is set to {most}, the largest length that the model supports")
    return settings.model_copy(update={"seq_len": most})


def positions_of(config: Any) -> int | None:
    """Return the number of positions that a model has or was trained for; `None` if unknown."""
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    return longest if isinstance(longest, int) else None


def check_seq_len(seq_len: int, config: Any) -> None:
    """Reject a length beyond learned positions, and warn of one beyond trained rotary positions.

    Raises:
        UsageError: the model has no embedding for the last positions.
    """
    longest = positions_of(config)
    if longest is None or seq_len <= longest:
        return
    if getattr(config.get_text_config(), "rope_parameters", None) is None:
        rule = f"the model has {longest} learned positions"
        raise UsageError(ConfigError(where="--seq-len", value=seq_len, rule=rule, fix=f"use at most {longest}"))
    note_on_first_rank(f"--seq-len {seq_len} exceeds the {longest} positions that the model was trained on")
