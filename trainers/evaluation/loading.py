"""The models of an evaluation: checked from their configuration first, loaded one at a time."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...ds_configs.specs.errors import Fault, FaultsError, RefusedInputError, ShardwrightError, UsageError
from ...plugins.huggingface_hub.hub import ModelSource, read_model_source
from ...plugins.huggingface_hub.model_directory import model_directory
from ...plugins.llm_compressor.quiet import without_bars
from ...plugins.transformers.sound_model import check_weights, loading_faults, refuse_code, refused_by_name
from ..data.models import TOKENIZER_FILES, StartingModel, load_tokenizer
from ..formats.spqr_format import QUANT_METHOD

_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A causal LM that can be loaded."""

    role: str
    """`model` or `baseline`."""
    source: ModelSource
    """Its configuration, checked."""
    config: Any
    """The same as Transformers reads it."""

    @property
    def name(self) -> str:
        """Name in messages."""
        return f"{self.role} {self.source.name}"

    @property
    def longest(self) -> int | None:
        """Tokens that it has positions for; `None` where it states none."""
        found = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return found if isinstance(found, int) and found > 0 else None

    @property
    def vocab_size(self) -> int:
        """Tokens that it has embeddings for."""
        return int(self.config.get_text_config().vocab_size)

    @property
    def quant_method(self) -> str | None:
        """Library whose format the weights have; `None` for plain ones."""
        stored = self.source.config.get("quantization_config") or {}
        return stored.get("quant_method") if isinstance(stored, dict) else None

    @property
    def quantization(self) -> str | None:
        """The same with the format, where the configuration states one."""
        if self.quant_method is None:
            return None
        stated = self.source.config["quantization_config"].get("format")
        return self.quant_method if stated is None else f"{self.quant_method}, {stated}"


def read_subject(where: str, role: str, *, revision: str | None) -> Subject:
    """Check that a model can be loaded, from its configuration alone.

    Raises:
        UsageError: nothing of that name exists, or it is no causal LM.
        RefusedInputError: files are damaged, or it has weights in other formats than safetensors only.
        ShardwrightError: the Hub cannot be reached.
    """
    from transformers import AutoConfig

    try:
        source = read_model_source(where, revision=revision)
    except FaultsError as error:
        if role == "model":
            raise
        renamed = [
            # Places that are no such word, such as directories, keep their names.
            replace(fault, where=re.sub(r"\Amodel(?![^ :])", role, fault.where))
            for fault in error.faults
        ]
        raise type(error)(renamed) from None
    refuse_code(source.config, f"{role} {source.name}")
    _check_weights(source, role)
    place = model_directory(source.name, revision=source.revision, weights=False)
    try:
        config = AutoConfig.from_pretrained(str(place), trust_remote_code=False)
    except (ValueError, OSError, KeyError) as error:
        raise RefusedInputError(Fault(where=role, value=where, rule=_one_line(error))) from None
    fault = _causal_fault(config, role, where)
    if fault is not None:
        raise UsageError(fault)
    return Subject(role=role, source=source, config=config)


def _check_weights(source: ModelSource, role: str) -> None:
    directory = Path(source.name)
    if source.revision is not None or not directory.exists():
        return
    if directory.is_file():
        rule, fix = "is a configuration without weights", "name the model's directory"
        raise UsageError(Fault(where=role, value=source.name, rule=rule, fix=fix))
    if any(directory.glob("*.safetensors")):
        _check_stored(directory, source)
        return
    others = sorted(path.name for pattern in _OTHER_WEIGHTS for path in directory.glob(pattern))
    if others:
        rule = f"weights are read from safetensors only, other formats can run code; it has {', '.join(others[:3])}"
        raise RefusedInputError(Fault(where=role, value=source.name, rule=rule, fix="convert them"))
    raise UsageError(Fault(where=role, value=source.name, rule="has no weights", fix="give a trained model"))


def _check_stored(directory: Path, source: ModelSource) -> None:
    stated = source.config.get("quantization_config") or source.config.get("compression_config")
    # The small format has files of its own, which are checked as they are read.
    if not (isinstance(stated, dict) and stated.get("quant_method") == QUANT_METHOD):
        check_weights(directory, quantized=bool(stated))


def _causal_fault(config: Any, role: str, where: str) -> Fault | None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    stated = tuple(getattr(config, "architectures", None) or ())
    classes = {name for found in KNOWN.values() for name in ((found,) if isinstance(found, str) else found)}
    is_causal = bool(classes & set(stated)) if stated else config.model_type in KNOWN
    if is_causal and not getattr(config, "is_encoder_decoder", False):
        return None
    rule = f"{' or '.join(stated) or config.model_type} is no causal language model, which predicts the next token"
    return Fault(where=role, value=where, rule=rule, fix="give a model such as LlamaForCausalLM")


def local_directory(subject: Subject) -> Path:
    """Return the directory with a model's weights; those of a Hub repository are fetched first.

    Raises:
        ShardwrightError: the Hub does not give the files.
        RefusedInputError: the repository has no safetensors.
    """
    name = subject.source.name
    found = model_directory(name, revision=subject.source.revision)
    if subject.source.revision is not None and not any(found.glob("*.safetensors")):
        rule = "has no safetensors weights; other formats can run code"
        raise RefusedInputError(Fault(where=subject.role, value=name, rule=rule, fix="convert them"))
    _check_stored(found, subject.source)
    return found


def subject_tokenizer(subject: Subject) -> Any:
    """Return a model's tokenizer; bytes where a local model has none."""
    where = subject.source.name
    source = StartingModel(model=where, revision=subject.source.revision)
    return load_tokenizer(source, subject.vocab_size)


def has_tokenizer(subject: Subject) -> bool:
    """Return whether a model has a tokenizer of its own; one of the Hub is taken to."""
    directory = Path(subject.source.name)
    return not directory.is_dir() or any((directory / name).is_file() for name in TOKENIZER_FILES)


def tokenizer_difference(model_tokenizer: Any, baseline_tokenizer: Any, text: str) -> Fault | None:
    """Return the first token in which two tokenizers differ, in their vocabularies or in how they split a text."""
    own = {index: token for token, index in model_tokenizer.get_vocab().items()}
    other = {index: token for token, index in baseline_tokenizer.get_vocab().items()}
    fix = "compare models of one family: KL and agreement need the same tokens"
    for index in sorted(own.keys() | other.keys()):
        if own.get(index) != other.get(index):
            rule = f"token {index} is {other.get(index)!r} here and {own.get(index)!r} in the model's"
            return Fault(where="baseline's tokenizer", rule=rule, fix=fix)
    split = [tokenizer(text)["input_ids"] for tokenizer in (baseline_tokenizer, model_tokenizer)]
    if split[0] != split[1]:
        at = next((i for i, (a, b) in enumerate(zip(*split, strict=False)) if a != b), min(map(len, split)))
        rule = (
            f"splits a text otherwise: from token {at} on {split[0][at : at + 3]} here, {split[1][at : at + 3]} there"
        )
        return Fault(where="baseline's tokenizer", rule=rule, fix=fix)
    return None


def load_subject(subject: Subject, directory: Path, *, dtype: str, device: str) -> Any:
    """Load weights and return the model, ready to read.

    compressed-tensors 0.19.0 decompresses a model in a hook of its first forward pass, which fails where a module's
    `forward` was replaced, so one token is read here.

    Raises:
        RefusedInputError: weights are missing, left over or of another shape, so that the model would not be the one
            that was saved.
        ShardwrightError: Transformers cannot load it; names its reason.
    """
    if subject.quant_method == QUANT_METHOD:
        return _load_small_format(directory, dtype, device)
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with without_bars(), refused_by_name(subject.name):
            model, found = AutoModelForCausalLM.from_pretrained(
                str(directory),
                dtype=dtype,
                device_map={"": device},
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
            if faults := loading_faults(found, subject.name):
                raise RefusedInputError(faults)
            model.eval()
            with torch.inference_mode():
                model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device))
    except ShardwrightError:
        raise
    except Exception as error:
        # A format's own library raises whatever it likes.
        rule = f"cannot be loaded ({type(error).__name__}: {_one_line(error)})"
        raise ShardwrightError(f"{subject.role} = {subject.source.name!r}: {rule}") from None
    return model


def _load_small_format(directory: Path, dtype: str, device: str) -> Any:
    import torch

    from ..formats.spqr_format import load_spqr

    model = load_spqr(directory).to(device).eval()
    return model if dtype == "auto" else model.to(getattr(torch, dtype))


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:297]}..."
