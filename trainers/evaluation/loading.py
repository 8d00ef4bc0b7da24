"""The models of an evaluation: checked from their configuration first, loaded one at a time; sizes of checkpoints."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...ds_configs.specs.errors import ConfigError, InputError, RefusedInputError, ShardwrightError, UsageError
from ...plugins.compressed_tensors.layout import load_packed_zero_points
from ...plugins.huggingface_hub.hub import ModelSource, model_directory, read_model_source
from ...plugins.llm_compressor.quiet import without_bars
from ...plugins.safetensors.reading import StoredTensor, each_tensor, read_checkpoint
from ...plugins.transformers.sound_model import (
    check_weights,
    loading_errors,
    refuse_code,
    refuse_other_formats,
    refused_by_name,
)
from ..data.models import StartingModel, has_tokenizer, load_tokenizer
from ..data.sources import one_line
from ..data.tokenizers import PROBE_TEXT
from ..formats.merge import OpenedAdapter
from ..formats.spqr import INDEX, QUANT_METHOD, SINGLE, small_layers

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
    adapter: OpenedAdapter | None = None
    """Adapter whose base model, or merged model, is `source`; `None` for a complete model."""

    @property
    def title(self) -> str:
        """Hub id or directory of the model, or of its adapter."""
        return self.source.name if self.adapter is None else self.adapter.name

    @property
    def name(self) -> str:
        return f"{self.role} {self.title}"

    @property
    def longest(self) -> int | None:
        """Number of token positions; `None` if the configuration has none."""
        positions = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return positions if isinstance(positions, int) and positions > 0 else None

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
    def local_name(self) -> str:
        """Name that another process can load: an absolute path, or a Hub id."""
        path = Path(self.source.name)
        return str(path.absolute()) if path.exists() else self.source.name

    @property
    def has_tokenizer(self) -> bool:
        """Whether the model has a tokenizer; for Hub models this is assumed."""
        directory = Path(self._tokenizer_source.model)
        return not directory.is_dir() or has_tokenizer(directory)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer; text is split into bytes if a local model has none."""
        return load_tokenizer(self._tokenizer_source, self.vocab_size)

    @property
    def _tokenizer_source(self) -> StartingModel:
        if self.adapter is not None:
            return self.adapter.tokenizer
        return StartingModel(model=self.source.name, revision=self.source.revision)


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
        if role == "model":
            raise
        # Directories keep their names; only the word "model" becomes the role.
        renamed = [
            replace(config_error, where=re.sub(r"\Amodel(?![^ :])", role, config_error.where))
            for config_error in error.errors
        ]
        raise type(error)(renamed) from None
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
        _check_stored(directory, source)
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


def _check_stored(directory: Path, source: ModelSource) -> None:
    quantization = source.config.get("quantization_config") or source.config.get("compression_config")
    # Files of the SpQR and low-rank format are checked while they are read.
    if not (isinstance(quantization, dict) and quantization.get("quant_method") == QUANT_METHOD):
        check_weights(directory, quantized=bool(quantization))


def local_directory(model: EvalModel) -> Path:
    """Return the directory with a model's weights; download those of a Hub repository.

    Raises:
        ShardwrightError: the Hub does not provide the files.
        RefusedInputError: the repository has no safetensors.
    """
    name = model.source.name
    directory = model_directory(name, revision=model.source.revision)
    if model.source.revision is not None and not any(directory.glob("*.safetensors")):
        rule = "has no safetensors weights; other formats can run code"
        raise RefusedInputError(ConfigError(where=model.role, value=name, rule=rule, fix="convert them"))
    _check_stored(directory, model.source)
    return directory


def shared_tokenizer(models: Sequence[EvalModel]) -> PreTrainedTokenizerBase:
    """Return the tokenizer of all models: the first model's, or the baseline's if the model has none.

    Raises:
        UsageError: the tokenizers differ, or a model has no embedding for a token.
    """
    owner = next((model for model in models if model.has_tokenizer), models[0])
    tokenizer = owner.tokenizer()
    for model in models:
        if model is not owner and model.has_tokenizer and owner.has_tokenizer:
            error = tokenizer_difference(tokenizer, model.tokenizer(), PROBE_TEXT)
            if error is not None:
                raise UsageError(error)
    largest = max(tokenizer.get_vocab().values())
    for model in models:
        if model is not owner and largest >= model.vocab_size:
            rule = f"{model.name} has {model.vocab_size} tokens, but the tokenizer's largest id is {largest}"
            raise UsageError(ConfigError(where="vocab_size", value=model.vocab_size, rule=rule))
    return tokenizer


def tokenizer_difference(
    model_tokenizer: PreTrainedTokenizerBase, baseline_tokenizer: PreTrainedTokenizerBase, text: str
) -> ConfigError | None:
    """Return the first token in which two tokenizers differ, in their vocabularies or in how they split a text."""
    own = {index: token for token, index in model_tokenizer.get_vocab().items()}
    other = {index: token for token, index in baseline_tokenizer.get_vocab().items()}
    fix = "compare models of one family: KL and agreement need the same tokens"
    for index in sorted(own.keys() | other.keys()):
        if own.get(index) != other.get(index):
            rule = f"token {index} is {other.get(index)!r}, but {own.get(index)!r} in the model's"
            return ConfigError(where="baseline's tokenizer", rule=rule, fix=fix)
    split = [tokenizer(text)["input_ids"] for tokenizer in (baseline_tokenizer, model_tokenizer)]
    if split[0] != split[1]:
        start = next((i for i, (a, b) in enumerate(zip(*split, strict=False)) if a != b), min(map(len, split)))
        rule = (
            f"splits a text differently: from token {start} on into {split[0][start : start + 3]}, the model's "
            f"into {split[1][start : start + 3]}"
        )
        return ConfigError(where="baseline's tokenizer", rule=rule, fix=fix)
    return None


def load_eval_model(model: EvalModel, directory: Path, *, dtype: str, device: str) -> PreTrainedModel:
    """Load the weights of a model for evaluation.

    compressed-tensors 0.19.0 decompresses a model in a hook of its first forward pass, which fails if a module's
    `forward` was replaced. Therefore one token is read here.

    Raises:
        RefusedInputError: weights are missing, unexpected or of another shape.
        ShardwrightError: Transformers cannot load the model; contains its reason.
    """
    import torch
    from transformers import AutoModelForCausalLM

    if model.quant_method == QUANT_METHOD:
        from ..formats.spqr import load_spqr

        small: PreTrainedModel = load_spqr(directory).to(device).eval()
        return small if dtype == "auto" else small.to(getattr(torch, dtype))
    if model.quant_method == "compressed-tensors":
        load_packed_zero_points()
    try:
        with without_bars(), refused_by_name(model.name):
            loaded: PreTrainedModel
            loaded, info = AutoModelForCausalLM.from_pretrained(
                str(directory),
                dtype=dtype,
                device_map={"": device},
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
            if errors := loading_errors(info, model.name):
                raise RefusedInputError(errors)
            loaded.eval()
            with torch.inference_mode():
                loaded(input_ids=torch.zeros(1, 1, dtype=torch.long, device=loaded.device))
    except ShardwrightError:
        raise
    except Exception as error:
        # The library of a format may raise anything.
        rule = f"cannot be loaded ({type(error).__name__}: {one_line(error)})"
        raise ShardwrightError(f"{model.role} = {model.source.name!r}: {rule}") from None
    return loaded


_PARTS = (
    "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_global_scale", "weight_g_idx",
    "input_scale", "input_zero_point", "input_global_scale", "SCB", "weight_format",
    "qweight", "qzeros", "scales", "g_idx",
)  # fmt: skip
"""Last name parts of tensors that only quantized checkpoints have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredSizes:
    """Sizes of a checkpoint."""

    file_bytes: int
    """Of all safetensors files."""
    parameters: int
    """Weights, biases and embeddings of the model; scales and zero points do not count."""
    bits_per_parameter: float
    """Stored bits of all tensors per parameter."""
    quantized_matrices: int
    """Matrices stored in fewer than 16 bits per element."""
    quantized_parameters: int
    """Elements of the quantized matrices."""
    bits_per_quantized_parameter: float | None
    """Stored bits per element, with scales, zero points and tables; `None` without quantized matrices."""


_SHAPE = ".weight_shape"
"""Suffix of the tensor with the rows and columns of a packed matrix."""


def stored_sizes(directory: Path) -> StoredSizes:
    """Return the sizes of a checkpoint.

    Raises:
        RefusedInputError: weight files are damaged or missing.
    """
    layers = small_layers(directory)
    names = {} if layers is None else {"index": INDEX, "single": SINGLE}
    tensors = read_checkpoint(directory, **names)
    shapes = {name: tensor for name, tensor in tensors.items() if name.endswith(_SHAPE)}
    stated = {name.removesuffix(_SHAPE): math.prod(shape.tolist()) for name, shape in each_tensor(shapes)}
    stated |= {name: math.prod(layer["shape"]) for name, layer in (layers or {}).items()}
    files = {tensor.file for tensor in tensors.values()}
    return sizes_of(tensors, stated, file_bytes=sum(file.stat().st_size for file in files))


def sizes_of(tensors: Mapping[str, StoredTensor], stated: Mapping[str, int], *, file_bytes: int) -> StoredSizes:
    """Return the sizes of tensors by name; `stated` holds element counts that the packed codes do not give."""
    matrices: dict[str, dict[str, StoredTensor]] = {}
    plain = 0
    for name, tensor in tensors.items():
        matrix, _, part = name.rpartition(".")
        described = (f"{matrix}.weight_scale", f"{matrix}.SCB", f"{matrix}.weight.absmax")
        if ".weight." in name:
            # bitsandbytes puts the description of the codes below the weight's name.
            matrix, _, last = name.partition(".weight.")
            part = f"weight.{last}"
        elif part == "weight":
            part = part if any(other in tensors for other in described) else ""
        elif part not in _PARTS and not part.startswith(("spqr_", "low_rank_")):
            part = ""
        if part:
            matrices.setdefault(matrix, {})[part] = tensor
        else:
            plain += tensor.elements
    elements = {matrix: _elements(parts, stated.get(matrix)) for matrix, parts in matrices.items()}
    quantized = sum(elements.values())
    bits = sum(tensor.bits for parts in matrices.values() for tensor in parts.values())
    return StoredSizes(
        file_bytes=file_bytes,
        parameters=plain + quantized,
        bits_per_parameter=sum(tensor.bits for tensor in tensors.values()) / max(1, plain + quantized),
        quantized_matrices=len(matrices),
        quantized_parameters=quantized,
        bits_per_quantized_parameter=bits / quantized if quantized else None,
    )


def _elements(parts: Mapping[str, StoredTensor], stated: int | None) -> int:
    if stated is not None:
        return stated
    if "weight_packed" in parts:
        # FP4 formats store no shape: each byte has two codes.
        return parts["weight_packed"].elements * 2
    if "qweight" in parts:
        # GPTQ packs along the inputs: `scales` [groups, out] and `g_idx` [in] give the shape. AWQ packs 8 codes of
        # 4 bits along the outputs.
        if "g_idx" in parts and "scales" in parts:
            return parts["g_idx"].elements * parts["scales"].shape[-1]
        return parts["qweight"].elements * 8
    weight = parts.get("weight")
    if weight is None:
        return 0
    return weight.elements * 2 if "weight.absmax" in parts else weight.elements
