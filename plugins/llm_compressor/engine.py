"""Runs llm-compressor's `oneshot` on a model in memory and on samples that are tokens already (seen with 0.14.0.1)."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from ...ds_configs.errors import Fault, UsageError
from ...ds_configs.quantization.config_json import config_group
from ...ds_configs.quantization.scheme import QuantizationScheme
from ..quantized_model import ReportProgress
from .fixes import all_fixes
from .range_observers import forget_range_observers, observer_name

EngineMethod = Literal["rtn", "gptq", "awq", "smoothquant", "smoothquant-gptq"]
_LEFTOVERS = ("recipe.yaml",)
"""Files that `save_pretrained` adds under llm-compressor, with this machine's paths in them."""


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """One run of llm-compressor."""

    model: Any
    """Transformers model with its full weights; changed in place, also by a run that fails."""
    tokenizer: Any
    """Asked for by `oneshot`, and not used on samples that are tokens already."""
    scheme: QuantizationScheme
    """What to quantize, and how; stored as compressed-tensors."""
    method: EngineMethod
    """How codes and scales are found."""
    calibration: Sequence[Mapping[str, Sequence[int]]] = ()
    """Samples with `input_ids`; may be empty for RTN without static activations."""
    batch_size: int = 1
    """Samples of one forward pass; samples of one batch are of equal length."""
    method_options: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the method's modifier."""
    journal: Path | None = None
    """Directory in which finished layers are kept for an interrupted run."""
    run_key: str = ""
    """Names model, text and settings of the run, so that a journal of another run is told apart."""
    seed: int = 0
    """Of everything random."""


@dataclass(kw_only=True)
class CompressedModel:
    """A model whose forward pass rounds as its checkpoint will."""

    model: Any
    """The same object as in the request."""
    quantized_layers: tuple[str, ...]
    """Names of the linear layers that were quantized."""

    def save(self, directory: Path) -> None:
        """Compress the model in memory and write config and weights; can be called once."""
        with _quiet_upstream(), all_fixes():
            self.model.save_pretrained(str(directory), save_compressed=True)
        for name in _LEFTOVERS:
            (directory / name).unlink(missing_ok=True)


def quantize_with_llm_compressor(request: EngineRequest, report: ReportProgress) -> CompressedModel:
    """Quantize a model in memory, one decoder layer after another.

    Raises:
        UsageError: options that the method does not have, or samples are missing.
    """
    import torch
    from llmcompressor import oneshot
    from llmcompressor.core import reset_session

    modifiers = _modifiers(request)
    torch.manual_seed(request.seed)
    if request.journal is not None:
        from .journal import JournalModifier

        modifiers.append(JournalModifier(directory=request.journal, key=request.run_key, report=report))
    else:
        from .progress import ProgressModifier

        modifiers.append(ProgressModifier(report=report))
    with _quiet_upstream(), all_fixes():
        reset_session()
        try:
            oneshot(
                model=request.model,
                processor=request.tokenizer,
                recipe=modifiers,
                dataset=_batches(request) if request.calibration else None,
            )
            forget_range_observers(request.model)
        finally:
            reset_session()
    request.model.eval()
    return CompressedModel(model=request.model, quantized_layers=_quantized_names(request.model))


def needs_calibration(scheme: QuantizationScheme, method: EngineMethod) -> bool:
    """Return whether samples are needed."""
    return method != "rtn" or scheme.activations_are_static


def _modifiers(request: EngineRequest) -> list[Any]:
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    if needs_calibration(request.scheme, request.method) and not request.calibration:
        rule = f"{request.method} with {request.scheme.name} needs text to calibrate on"
        raise UsageError(Fault(where="dataset", rule=rule, fix="name one with --dataset, such as python-help"))
    kinds = {
        "rtn": (QuantizationModifier,),
        "gptq": (GPTQModifier,),
        "awq": (AWQModifier, QuantizationModifier),
        "smoothquant": (SmoothQuantModifier, QuantizationModifier),
        "smoothquant-gptq": (SmoothQuantModifier, GPTQModifier),
    }[request.method]
    common = {"config_groups": {"group_0": _scheme_arguments(request.scheme)}, "ignore": list(request.scheme.ignore)}
    shared = {"config_groups", "targets", "ignore", "scheme", "kv_cache_scheme", "index", "group", "start", "end"}
    known = {name: kind for kind in kinds for name in kind.model_fields if name not in shared and name[-1] != "_"}
    unknown = [name for name in request.method_options if name not in known]
    if unknown:
        raise UsageError([_unknown_option(name, request.method, known) for name in unknown])
    return [
        kind(
            **(common if issubclass(kind, QuantizationModifier | GPTQModifier) else {}),
            **{name: value for name, value in request.method_options.items() if known[name] is kind},
        )
        for kind in kinds
    ]


def _unknown_option(name: str, method: str, known: Mapping[str, Any]) -> Fault:
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    fix = f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(known))}"
    return Fault(where="method_options", value=name, rule=f"is no option of {method}", fix=fix)


def _scheme_arguments(scheme: QuantizationScheme) -> dict[str, Any]:
    """Return what the modifiers build their scheme from, with the observer that finds static ranges."""
    group = config_group(scheme)
    if scheme.activations is not None and group["input_activations"]["dynamic"] is False:
        name, options = observer_name(scheme.activations)
        group["input_activations"] |= {"observer": name, "observer_kwargs": options}
    return group


def _batches(request: EngineRequest) -> Any:
    """Return a DataLoader over batches of equal length: padding would count as text in Hessians and ranges."""
    import torch
    from torch.utils.data import DataLoader

    by_length: dict[int, list[Any]] = {}
    for sample in request.calibration:
        by_length.setdefault(len(sample["input_ids"]), []).append(torch.tensor(list(sample["input_ids"])))
    batches = []
    for rows in by_length.values():
        for start in range(0, len(rows), request.batch_size):
            ids_BS = torch.stack(rows[start : start + request.batch_size])
            batches.append({"input_ids": ids_BS, "attention_mask": torch.ones_like(ids_BS)})
    return DataLoader(batches, batch_size=None)


def _quantized_names(model: Any) -> tuple[str, ...]:
    return tuple(
        name
        for name, module in model.named_modules()
        if getattr(getattr(module, "quantization_scheme", None), "weights", None) is not None
        and getattr(module, "weight", None) is not None
    )


@contextmanager
def _quiet_upstream() -> Iterator[None]:
    """Keep llm-compressor's bars, log lines and log files out of a command's output."""
    import llmcompressor.modifiers.transform.awq.base as awq
    import llmcompressor.pipelines.cache as cache
    import llmcompressor.pipelines.sequential.pipeline as sequential
    from loguru import logger
    from tqdm import tqdm

    saved = {name: os.environ.get(name) for name in ("TOKENIZERS_PARALLELISM", "LLM_COMPRESSOR_LOG_FILE")}
    os.environ["TOKENIZERS_PARALLELISM"] = saved["TOKENIZERS_PARALLELISM"] or "false"
    os.environ.pop("LLM_COMPRESSOR_LOG_FILE", None)
    names = ("llmcompressor", "compressed_tensors")
    bars = [(module, module.tqdm) for module in (awq, cache, sequential) if hasattr(module, "tqdm")]

    def without_bar(*arguments: Any, **named: Any) -> Any:
        return tqdm(*arguments, **(named | {"disable": True}))

    handler = logger.add(_forward_warning, level="WARNING", format="{message}")
    for name in names:
        logger.disable(name)
    for module, _ in bars:
        module.tqdm = without_bar
    try:
        yield
    finally:
        logger.remove(handler)
        for name in names:
            logger.enable(name)
        for module, original in bars:
            module.tqdm = original
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _forward_warning(message: Any) -> None:
    logging.getLogger(__name__).warning(str(message).rstrip())
