"""Stored ranges of activations, found on the whole model before its ranks are launched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....plugins.launching.notes import Notify
from ...data.samples import Sample

if TYPE_CHECKING:
    from .inputs import PreparedQAT

_SAMPLES_AT_ONCE = 8


def calibrate(prepared: PreparedQAT, file: Path, notify: Notify) -> None:
    """Find the stored ranges on the whole model, in the type that it is stored in, and write them for the ranks.

    Ranks of ZeRO-3 hold parts of a weight and could not.
    """
    import torch

    from ....plugins.peft.lora import add_lora
    from ...data.models import StartingModel, load_config, load_model
    from ..rounding.attach import attach
    from ..rounding.input_ranges import calibrate_inputs, save_ranges

    settings = prepared.settings
    source = StartingModel(model=prepared.source.name, revision=settings.revision)
    dtype = getattr(torch, prepared.source.dtype)
    model = load_model(source, load_config(source), dtype, settings.seed)
    device = _calibration_device(sum(parameter.nbytes for parameter in model.parameters()))
    if settings.method == "lora":
        model = add_lora(model, rank=settings.lora_rank, targets=settings.lora_targets, fp32_adapters=False)
    model.to(device)
    attachment = attach(model, prepared.config)
    chosen = prepared.samples.train[: settings.calibration_samples]
    notify(f"finding the ranges of {len(attachment.ranges)} inputs on {len(chosen)} samples, on {device}")
    calibrate_inputs(model, attachment, calibration_batches(chosen, device))
    save_ranges(file, attachment)
    del model, attachment
    if device != "cpu":
        torch.cuda.empty_cache()


def calibration_batches(samples: Sequence[Sample], device: str) -> Iterator[dict[str, Any]]:
    """Yield batches of samples of one length: ranges must not see padding."""
    import torch

    for _, same in groupby(samples, key=lambda sample: len(sample["input_ids"])):
        rows = [sample["input_ids"] for sample in same]
        for first in range(0, len(rows), _SAMPLES_AT_ONCE):
            yield {"input_ids": torch.tensor(rows[first : first + _SAMPLES_AT_ONCE], device=device)}


def _calibration_device(weight_bytes: int) -> str:
    """Return an accelerator that has room for a model and its activations, or else the CPU."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    return "cuda:0" if torch.cuda.mem_get_info(0)[0] > 1.5 * weight_bytes else "cpu"
