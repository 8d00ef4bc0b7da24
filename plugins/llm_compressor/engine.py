"""Runs llm-compressor's `oneshot` on a model in memory and on samples that are tokens already (seen with 0.14.0.1)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...ds_configs.quantization.scheme import QuantizationScheme
from ...ds_configs.specs.errors import Fault, UsageError
from ..transformers.quantized_model import ReportProgress
from .experts import restore_expert_names
from .fixes import all_fixes
from .journal import Journal, run_identity
from .progress import Steps, count_parts
from .quiet import import_upstream, named_by_directory, quiet_upstream, without_hub_name
from .range_observers import forget_range_observers
from .recipe_objects import EngineMethod, ModifierPass, build_modifiers

_LEFTOVERS = ("recipe.yaml",)
"""Files that `save_pretrained` adds under llm-compressor, with this machine's paths in them."""


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """One run of llm-compressor."""

    model: Any
    """Transformers model with its full weights; changed in place, also by a run that fails."""
    tokenizer: Any
    """Asked for by `oneshot`, and not used on samples that are tokens already; may be `None`."""
    scheme: QuantizationScheme
    """What to quantize, and how; stored as compressed-tensors."""
    method: EngineMethod
    """How codes and scales are found."""
    calibration: Sequence[Mapping[str, Sequence[int]]] = ()
    """Samples with `input_ids`; may be empty for RTN without static activations."""
    batch_size: int = 1
    """Samples of one forward pass; samples of one batch are of equal length."""
    method_options: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the method's modifiers."""
    journal: Path | None = None
    """Directory in which finished layers are kept for an interrupted run; `None` keeps none."""
    run_key: str = ""
    """Names model, text and settings of the run, so that a journal of another run is told apart."""
    seed: int = 0
    """Of everything random."""
    stored_names: Collection[str] = ()
    """Tensors of the checkpoint that the model came from, after which those of experts are named again."""


@dataclass(kw_only=True)
class CompressedModel:
    """A model whose forward pass rounds as its checkpoint will."""

    model: Any
    """The same object as in the request."""
    quantized_layers: tuple[str, ...]
    """Names of the linear layers that were quantized."""
    stored_names: Collection[str] = ()
    """As in the request."""

    def save(self, directory: Path) -> None:
        """Compress the model in memory and write config and weights; can be called once."""
        from llmcompressor.transformers.compression.compressed_tensors_utils import modify_save_pretrained

        with quiet_upstream(), all_fixes(), without_hub_name(self.model):
            modify_save_pretrained(self.model)
            try:
                self.model.save_pretrained(str(directory), save_compressed=True)
            finally:
                vars(self.model).pop("save_pretrained", None)
        for name in _LEFTOVERS:
            (directory / name).unlink(missing_ok=True)
        restore_expert_names(directory, self.stored_names)


def quantize_with_llm_compressor(request: EngineRequest, report: ReportProgress) -> CompressedModel:
    """Quantize a model in memory, one decoder layer after another.

    With a journal, layers that an interrupted run finished are copied from it, and data are only passed through them.

    Raises:
        UsageError: options that the method does not have, samples are missing, or the journal is another run's.
    """
    import torch

    import_upstream()
    from llmcompressor import oneshot
    from llmcompressor.core import reset_session

    modifiers = build_modifiers(request.scheme, request.method, request.method_options)
    needs_samples = any(modifier.requires_calibration_data for modifier in modifiers)
    if needs_samples and not request.calibration:
        rule = f"{request.method} with {request.scheme.name} needs text to calibrate on"
        raise UsageError(Fault(where="dataset", rule=rule, fix="name one with --dataset, such as python-help"))
    steps = Steps(tuple(count_parts(request.model) if m.requires_calibration_data else 1 for m in modifiers), report)
    remaining = _follow(modifiers, request, steps)
    with quiet_upstream(), all_fixes(), named_by_directory(request.model), torch.random.fork_rng():
        torch.manual_seed(request.seed)
        reset_session()
        try:
            oneshot(
                model=request.model,
                processor=request.tokenizer or _NoTokenizer(),
                recipe=remaining,
                dataset=_batches(request) if needs_samples else None,
            )
            forget_range_observers(request.model)
        finally:
            for modifier in remaining:
                modifier.remove_hooks()
            reset_session()
            vars(request.model).pop("save_pretrained", None)
    request.model.eval()
    steps.done()
    names = _quantized_names(request.model)
    return CompressedModel(model=request.model, quantized_layers=names, stored_names=request.stored_names)


class _NoTokenizer:
    """Stands where `oneshot` 0.14.0.1 demands a processor for any data, or loads one by the model's name."""


def _follow(modifiers: Sequence[Any], request: EngineRequest, steps: Steps) -> list[Any]:
    """Attach progress and journal to the modifiers, and return those whose pass is not finished."""
    journal = None
    if request.journal is not None:
        identity = run_identity(
            run_key=request.run_key,
            scheme=request.scheme,
            method=request.method,
            method_options=request.method_options,
            calibration=request.calibration,
            batch_size=request.batch_size,
            seed=request.seed,
        )
        journal = Journal(request.journal, identity)
    current = max((entry.phase for entry in journal.entries), default=0) if journal is not None else 0
    parts = count_parts(request.model)
    if journal is not None and len(journal.of_phase(current)) >= parts and current + 1 < len(modifiers):
        current += 1
    remaining = list(modifiers[current:])
    for phase, modifier in enumerate(remaining, start=current):
        entries = () if journal is None else journal.entries
        modifier.follow(
            ModifierPass(
                phase=phase,
                steps=steps,
                journal=journal,
                finished=tuple(entry for entry in entries if entry.phase == phase),
                before=tuple(entry for entry in entries if entry.phase < phase) if phase == current else (),
            )
        )
    return remaining


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
