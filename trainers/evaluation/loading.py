"""The models of an evaluation: checked from their configuration first, loaded one at a time; sizes of checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...ds_configs.specs.errors import ConfigError, InputError, RefusedInputError, ShardwrightError, UsageError
from ...plugins.compressed_tensors.layout import load_packed_zero_points
from ...plugins.huggingface_hub import ModelSource, model_directory, read_model_source
from ...plugins.llm_compressor.quiet import without_bars
from ...plugins.planning import load_model_spec
from ...plugins.safetensors import read_checkpoint
from ...plugins.transformers.sound_model import (
    check_weights,
    load_causal_lm,
    refuse_code,
    refuse_other_formats,
)
from ..data.models import StartingModel, agreed_vocab_size, has_tokenizer, load_tokenizer, positions_of
from ..data.sources import one_line
from ..formats.spqr import INDEX, QUANT_METHOD, SINGLE

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class EvalModel:
    """A causal language model that can be loaded."""

    role: str
    """`model` or `baseline`."""
    source: ModelSource
    config: PretrainedConfig
    """The configuration as Transformers reads it."""

    @property
    def name(self) -> str:
        return f"{self.role} {self.source.name}"

    @property
    def longest(self) -> int | None:
        """Number of token positions; `None` if the configuration has none."""
        return positions_of(self.config) or None

    @property
    def vocab_size(self) -> int:
        return int(self.config.get_text_config().vocab_size)

    @property
    def quant_method(self) -> str | None:
        """Library of the weights' format; `None` for plain weights."""
        stored = self.source.config.get("quantization_config") or {}
        return stored.get("quant_method") if isinstance(stored, dict) else None

    @property
    def quantization(self) -> str | None:
        """Library and, if the configuration names it, format of quantized weights."""
        if self.quant_method is None:
            return None
        name = self.source.config["quantization_config"].get("format")
        return self.quant_method if name is None else f"{self.quant_method}, {name}"

    @property
    def has_tokenizer(self) -> bool:
        """Whether the model has a tokenizer; for Hub models this is assumed."""
        directory = Path(self.source.name)
        return not directory.is_dir() or has_tokenizer(directory)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer; text is split into bytes if a local model has none."""
        source = StartingModel(model=self.source.name, revision=self.source.revision)
        return load_tokenizer(source, self.vocab_size)


def read_eval_model(name: str, role: str, *, revision: str | None) -> EvalModel:
    """Check from its configuration that a model can be loaded.

    Raises:
        UsageError: no such model exists, or it is not a causal language model.
        RefusedInputError: files are damaged, or the only weights are not safetensors.
        ShardwrightError: the Hub cannot be reached.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_MODELS

    try:
        source = read_model_source(name, revision=revision)
    except InputError as error:
        errors = [replace(each, where=role) if each.where == "model" else each for each in error.errors]
        raise type(error)(errors) from None
    refuse_code(source.config, f"{role} {source.name}")
    directory = Path(source.name)
    if source.revision is None and directory.exists():
        if directory.is_file():
            rule, fix = "is a configuration without weights", "pass the model's directory"
            raise UsageError(ConfigError(where=role, value=source.name, rule=rule, fix=fix))
        if not any(directory.glob("*.safetensors")):
            refuse_other_formats(directory, where=role)
            fix = "pass a trained model"
            raise UsageError(ConfigError(where=role, value=source.name, rule="has no weights", fix=fix))
        quantization = source.config.get("quantization_config") or source.config.get("compression_config") or {}
        # Files of the SpQR and low-rank format are checked while they are read.
        if quantization.get("quant_method") != QUANT_METHOD:
            check_weights(directory, quantized=bool(quantization))
    try:
        configuration = model_directory(source.name, revision=source.revision, weights=False)
        config = AutoConfig.from_pretrained(str(configuration), trust_remote_code=False)
    except (ValueError, OSError, KeyError) as error:
        raise RefusedInputError(ConfigError(where=role, value=name, rule=one_line(error))) from None
    architectures = tuple(getattr(config, "architectures", None) or ())
    classes = {cls for names in CAUSAL_MODELS.values() for cls in ((names,) if isinstance(names, str) else names)}
    is_causal = bool(classes & set(architectures)) if architectures else config.model_type in CAUSAL_MODELS
    if not is_causal or getattr(config, "is_encoder_decoder", False):
        rule = f"{' or '.join(architectures) or config.model_type} is not a causal language model"
        fix = "pass a model such as LlamaForCausalLM"
        raise UsageError(ConfigError(where=role, value=name, rule=rule, fix=fix))
    return EvalModel(role=role, source=source, config=config)


def shared_tokenizer(models: Sequence[EvalModel]) -> PreTrainedTokenizerBase:
    """Return the tokenizer of all models: the first model's, or the baseline's if the model has none.

    Raises:
        UsageError: the tokenizers differ, or a model has no embedding for a token.
    """
    owner = next((model for model in models if model.has_tokenizer), models[0])
    tokenizer = owner.tokenizer()
    for model in models:
        if model is not owner and model.has_tokenizer and owner.has_tokenizer:
            fix = "compare models of one family: KL and agreement need the same tokens"
            agreed_vocab_size(tokenizer, model.tokenizer(), roles=("model", "baseline"), fix=fix)
    largest = max(tokenizer.get_vocab().values())
    for model in models:
        if model is not owner and largest >= model.vocab_size:
            rule = f"{model.name} has {model.vocab_size} tokens, but the tokenizer's largest id is {largest}"
            raise UsageError(ConfigError(where="vocab_size", value=model.vocab_size, rule=rule))
    return tokenizer


def load_eval_model(model: EvalModel, directory: Path, *, dtype: str, device: str) -> PreTrainedModel:
    """Load the weights of a model for evaluation.

    compressed-tensors 0.19.0 decompresses a model in a hook of its first forward pass, which fails if a module's
    `forward` was replaced. Therefore one token is read here.

    Raises:
        RefusedInputError: weights are missing, unexpected or of another shape.
        ShardwrightError: Transformers cannot load the model; contains its reason.
    """
    import torch

    if model.quant_method == QUANT_METHOD:
        from ..formats.spqr import load_spqr

        small: PreTrainedModel = load_spqr(directory).to(device).eval()
        return small if dtype == "auto" else small.to(getattr(torch, dtype))
    if model.quant_method == "compressed-tensors":
        load_packed_zero_points()
    try:
        with without_bars():
            # An evaluation names the first token whose loss is not finite.
            name, revision = model.source.name, model.source.revision
            options: dict[str, Any] = {"dtype": dtype, "device_map": {"": device}}
            loaded = load_causal_lm(name, revision=revision, allow_nonfinite=True, **options)
            with torch.inference_mode():
                loaded.eval()(input_ids=torch.zeros(1, 1, dtype=torch.long, device=loaded.device))
    except ShardwrightError:
        raise
    except Exception as error:
        # The library of a format may raise anything.
        rule = f"cannot be loaded ({type(error).__name__}: {one_line(error)})"
        raise ShardwrightError(f"{model.role} = {model.source.name!r}: {rule}") from None
    return loaded


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredSizes:
    """Sizes of a checkpoint."""

    file_bytes: int
    """Of all safetensors files."""
    parameters: int
    """Weights, biases and embeddings of the model; scales and zero points do not count."""
    bits_per_parameter: float
    """Stored bits of all tensors, scales and tables included, per parameter."""


def stored_sizes(model: EvalModel, directory: Path) -> StoredSizes:
    """Return the sizes of a model's checkpoint in a directory.

    Raises:
        RefusedInputError: weight files are damaged or missing.
    """
    is_small = model.quant_method == QUANT_METHOD
    tensors = read_checkpoint(directory, **({"index": INDEX, "single": SINGLE} if is_small else {}))
    parameters = load_model_spec(str(directory)).spec.parameter_count
    return StoredSizes(
        file_bytes=sum(file.stat().st_size for file in {tensor.file for tensor in tensors.values()}),
        parameters=parameters,
        bits_per_parameter=sum(tensor.bits for tensor in tensors.values()) / parameters,
    )
