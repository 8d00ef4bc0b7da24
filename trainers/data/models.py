"""The model that a training or an evaluation starts from: its configuration, weights and tokenizer, and nothing else.

Weights come from safetensors alone, and code that a repository ships is never run.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ...ds_configs.specs.errors import Fault, RefusedInputError, UsageError
from ...plugins.bitsandbytes.checkpoint import keep_layout
from ...plugins.bitsandbytes.sharded_loading import is_divided, on_host, place_for_division
from ...plugins.huggingface_hub.model_directory import model_directory
from ...plugins.launching.notes import note_on_first_rank
from ...plugins.peft.lora import four_bit_loading
from ...plugins.safetensors.reading import INDEX
from ...plugins.transformers.sound_model import (
    check_config,
    check_weights,
    load_causal_lm,
    refused_by_name,
)
from ...plugins.transformers.training_arguments import byte_tokenizer
from .settings import DataSettings

Kind = TypeVar("Kind", bound=DataSettings)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


@dataclass(frozen=True, kw_only=True, slots=True)
class StartingModel:
    """Origin of a model."""

    model: str
    """Hub id, local directory, or `config.json`."""
    revision: str | None = None
    """Branch, tag or commit of a Hub model; `None` for the newest of its main branch."""
    tokenizer: str | None = None
    """Hub id or directory of another tokenizer; `None` for the model's own."""
    random_weights: bool = False
    """Whether weights are initialised from the configuration and none are read."""
    method: str = "full"
    """`full`, `lora` or `qlora`, which loads weights in 4 bits."""


def load_config(source: StartingModel) -> Any:
    """Read the model configuration; code that a repository ships is never run.

    Raises:
        RefusedInputError: it is damaged, absurd or names code.
    """
    from transformers import AutoConfig

    place = model_directory(source.model, revision=source.revision, weights=False)
    check_config(str(place))
    with refused_by_name(source.model):
        config = AutoConfig.from_pretrained(str(place), trust_remote_code=False)
    if not Path(source.model).expanduser().exists():
        config._name_or_path, config._commit_hash = source.model, place.name
    return config


def load_model(
    source: StartingModel, config: Any, dtype: Any, seed: int, *, engine: str | None = None, for_stages: bool = False
) -> Any:
    """Load or initialise the model; under ZeRO-3 the weights are partitioned while they are made.

    4-bit weights that the `engine` divides are loaded into host memory, from where it takes them piece by piece.
    `for_stages` leaves weights to the stages of a pipeline where these can get them as they are wanted: the model is
    then the name of its checkpoint, or without memory.

    Raises:
        RefusedInputError: A local directory has weights in another format than safetensors.
        UsageError: 4-bit weights are asked for where there are none to load.
    """
    import torch
    from transformers import AutoModelForCausalLM, set_seed

    set_seed(seed)
    place = Path(source.model)
    random_weights = source.random_weights or place.is_file()
    # An index without shards is damaged weights, which are refused by name below.
    if place.is_dir() and not random_weights and not (any(place.glob("*.safetensors")) or (place / INDEX).exists()):
        unsafe = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in place.glob(pattern))
        if unsafe:
            raise RefusedInputError(
                Fault(
                    where=str(place),
                    value=unsafe,
                    rule="weights are read from safetensors only, other formats can run code",
                    fix="convert them, or pass --random-weights",
                )
            )
        note_on_first_rank(f"{place} has no weights: they are initialised at random")
        random_weights = True
    if random_weights and source.method == "qlora":
        raise UsageError(Fault(where="--method", value="qlora", rule="quantizes loaded weights", fix="use lora"))
    if random_weights:
        with torch.device("meta") if for_stages else nullcontext():
            return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    if for_stages and source.method == "full":
        place = model_directory(source.model, revision=source.revision)
        check_weights(place)
        return str(place)
    divided = source.method == "qlora" and is_divided(engine)
    host: AbstractContextManager[dict[str, Any]] = on_host() if divided else nullcontext({})
    with host as placement:
        model = load_causal_lm(
            source.model,
            # Weights of the training are looked at when it begins, where --allow-nonfinite is known.
            allow_nonfinite=True,
            revision=source.revision,
            config=config,
            dtype=dtype,
            quantization_config=four_bit_loading(dtype) if source.method == "qlora" else None,
            **placement,
        )
    model = keep_layout(model) if source.method == "qlora" else model
    return place_for_division(model) if divided else model


def load_tokenizer(source: StartingModel, vocab_size: int) -> Any:
    """Return the tokenizer: the named one, the model's, or bytes when a local model has none.

    Raises:
        UsageError: The tokenizer produces ids that the model has no embedding for.
    """
    from transformers import AutoTokenizer

    place = Path(source.tokenizer or source.model)
    found = any((place / name).is_file() for name in TOKENIZER_FILES)
    if source.tokenizer is None and place.exists() and not found:
        note_on_first_rank(f"{place} has no tokenizer: text is split into bytes")
        return byte_tokenizer(vocab_size)
    revision = None if source.tokenizer else source.revision
    directory = model_directory(str(place), revision=revision, weights=False)
    tokenizer = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False)
    tokenizer.name_or_path = str(place)
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocab_size:
        rule = f"its ids must be below the model's vocab_size = {vocab_size}, the largest is {largest}"
        raise UsageError(Fault(where="--tokenizer", value=str(place), rule=rule))
    return tokenizer


def with_positions(settings: Kind, *configs: Any) -> Kind:
    """Return settings whose samples have positions in all models: a length that nobody stated is shortened.

    Raises:
        UsageError: a length was stated for which a model has no embedding.
    """
    if "seq_len" in settings.model_fields_set:
        for config in configs:
            check_seq_len(settings.seq_len, config)
        return settings
    limits = [limit for config in configs if (limit := positions_of(config)) is not None]
    most = min([settings.seq_len, *limits])
    if most == settings.seq_len:
        return settings
    note_on_first_rank(f"samples of {most} tokens, the most that the model has positions for")
    return settings.model_copy(update={"seq_len": most})


def positions_of(config: Any) -> int | None:
    """Return the positions that a model has or was trained for; `None` where nothing says so."""
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    return longest if isinstance(longest, int) else None


def check_seq_len(seq_len: int, config: Any) -> None:
    """Refuse a sequence beyond learned positions, and remark on one beyond what rotary positions were trained for.

    Raises:
        UsageError: the model has no embedding for the last positions.
    """
    longest = positions_of(config)
    if longest is None or seq_len <= longest:
        return
    if getattr(config.get_text_config(), "rope_parameters", None) is None:
        rule = f"the model has {longest} learned positions"
        raise UsageError(Fault(where="--seq-len", value=seq_len, rule=rule, fix="lower it"))
    note_on_first_rank(f"--seq-len {seq_len} is beyond the {longest} positions that the model was trained for")
