"""Checks of a quantization before weights are read or anything is written: all that can be wrong, told together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...ds_configs.plan.output import disk_faults, output_faults
from ...ds_configs.quantization.layers import LinearLayer
from ...ds_configs.quantization.memory import QuantizationMemory
from ...ds_configs.quantization.methods import METHODS, MethodName, needs_calibration
from ...ds_configs.quantization.recipe import QuantizeSettings
from ...ds_configs.quantization.resolved import ResolvedQuantization, SelectedQuantization
from ...ds_configs.quantization.scheme import QuantizationScheme
from ...ds_configs.quantization.sizes import tensor_bytes
from ...ds_configs.specs.errors import DoesNotFitError, Fault, UsageError, collecting
from ...ds_configs.specs.units import gigabytes
from ...plugins.launching.notes import Notify
from ...plugins.transformers.quantization_source import QuantizationSource, open_source
from ..data.models import StartingModel, load_tokenizer
from ..data.samples import Samples, load_samples
from ..data.sources import local_place
from ..evaluation.inputs import default_device
from .journal import journal_faults

_PACKAGES = {
    "llm-compressor": ("llmcompressor",),
    "auto-round": ("auto_round", "compressed_tensors"),
    # Its walk through the layers is llm-compressor's.
    "shardwright": ("llmcompressor",),
}
"""Imports of the extra `quantize`, by engine."""
_HELD_OUT = 0.1
"""Share of the calibration rows that is kept for the evaluation."""
_FEWEST_USEFUL_TOKENS = 1024
"""Fewer give noisy ranges and second moments, and a remark."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A quantization that can start; nothing was written for it."""

    settings: QuantizeSettings
    """As the user gave them."""
    source: QuantizationSource
    """The model's files."""
    resolved: ResolvedQuantization
    """Scheme and method, as asked for or chosen."""
    selected: SelectedQuantization
    """What they mean for the layers of this model."""
    tokenizer: Any
    """Splits the calibration text."""
    samples: Samples | None
    """Calibration and held-out samples; `None` where the method needs no text and none was named."""
    seq_len: int
    """Tokens of a sample."""
    memory: QuantizationMemory
    """What it will need at most."""
    checkpoint_bytes: int
    """Size of the weights that will be written."""

    @property
    def scheme(self) -> QuantizationScheme:
        """The scheme with what this model needs left out."""
        return self.selected.scheme

    @property
    def layers(self) -> tuple[LinearLayer, ...]:
        """Layers that will be quantized."""
        return self.selected.layers

    @property
    def calibration(self) -> Sequence[dict[str, list[int]]]:
        """Samples that scales and codes are found on."""
        if self.samples is None or not needs_calibration(self.resolved.method, self.scheme):
            return ()
        return self.samples.train[: self.settings.num_samples]


def prepare(
    model: str,
    settings: QuantizeSettings,
    output_dir: Path | None,
    *,
    revision: str | None = None,
    device: str | None = None,
    force: bool = False,
    resume: bool = False,
    notify: Notify = lambda _: None,
) -> Prepared:
    """Read what can be wrong, report all faults together, and say what it will take.

    Raises:
        UsageError: flags, shapes or text that do not go together, all together.
        RefusedInputError: files of the model are corrupt, unsafe or quantized already.
        DoesNotFitError: memory or disk is too small.
        ShardwrightError: the Hub cannot be reached.
    """
    faults: list[Fault] = []
    if output_dir is not None:
        sources = {"the model": model, "the dataset": local_place(settings.dataset)}
        faults += output_faults(output_dir, force=force, sources=sources)
        faults += journal_faults(output_dir, resume=resume, force=force)
    resolved = source = None
    with collecting(faults):
        resolved = settings.resolved()
    with collecting(faults):
        source = open_source(model, revision=revision)
    faults += [] if resolved is None else missing_engine_faults(resolved.method)
    if source is None or resolved is None:
        raise UsageError(faults)
    selected = resolved.of_layers(
        source.layers, default_ignore=source.default_ignore if settings.ignore is None else None
    )
    faults += selected.faults()
    samples, tokenizer, seq_len = None, None, settings.seq_len
    with collecting(faults):
        tokenizer = load_tokenizer(StartingModel(model=str(source.directory)), source.dimensions.vocab_size)
        samples, seq_len = _samples(settings, source, tokenizer, notify)
    if faults:
        raise UsageError(faults)
    for remark in selected.remarks():
        notify(remark)
    prepared = Prepared(
        settings=settings,
        source=source,
        resolved=resolved,
        selected=selected,
        tokenizer=tokenizer,
        samples=samples,
        seq_len=seq_len,
        memory=selected.memory(
            dimensions=source.dimensions,
            weight_bytes=tensor_bytes(source.tensors.values()),
            num_samples=settings.num_samples if samples is None else min(settings.num_samples, len(samples.train)),
            seq_len=seq_len,
            batch_size=settings.batch_size,
            device="cpu" if (device or default_device()) == "cpu" else "cuda",
            dtype=source.dtype,
        ),
        checkpoint_bytes=selected.checkpoint_bytes(
            source.tensors, dtype=source.dtype, kept_in_fp32=source.kept_in_fp32
        ),
    )
    _check_capacity(prepared, output_dir)
    return prepared


def missing_engine_faults(method: MethodName) -> list[Fault]:
    """Return the packages that a method runs on and that are not installed."""
    fix = "shardwright env create quantize makes an environment that has it; or pip install '.[quantize]'"
    return [
        Fault(where="method", value=method, rule=f"needs {package}, which is not installed", fix=fix)
        for package in _PACKAGES.get(METHODS[method].engine, ())
        if find_spec(package) is None
    ]


def _samples(
    settings: QuantizeSettings, source: QuantizationSource, tokenizer: Any, notify: Notify
) -> tuple[Samples | None, int]:
    seq_len = min(settings.seq_len, source.longest or settings.seq_len)
    if seq_len < settings.seq_len:
        asked = f", in the place of {settings.seq_len}" if "seq_len" in settings.model_fields_set else ""
        notify(f"samples of {seq_len} tokens, the most that the model has positions for{asked}")
    if settings.dataset is None:
        return None, seq_len
    samples = load_samples(
        settings.dataset,
        tokenizer,
        seq_len=seq_len,
        seed=settings.seed,
        evaluation_fraction=_HELD_OUT,
    )
    found = len(samples.train)
    if found < settings.num_samples:
        notify(f"{settings.dataset} has {found} calibration samples of {seq_len} tokens; {settings.num_samples} asked")
    if min(found, settings.num_samples) * seq_len < _FEWEST_USEFUL_TOKENS:
        notify("the calibration text is very short: ranges and second moments will be noisy")
    return samples, seq_len


def _check_capacity(prepared: Prepared, output_dir: Path | None) -> None:
    import psutil
    import torch

    memory, lines = prepared.memory, []
    host = psutil.virtual_memory().available
    if memory.peak_host_bytes > host:
        lines.append(
            f"host memory: needs {gigabytes(memory.peak_host_bytes)} GB, {gigabytes(host)} GB are free; "
            "use fewer samples (--num-samples), shorter ones (--seq-len), or a machine with more memory"
        )
    if memory.peak_device_bytes and torch.cuda.is_available():
        free = torch.cuda.mem_get_info()[0]
        if memory.peak_device_bytes > free:
            lines.append(
                f"device memory: needs {gigabytes(memory.peak_device_bytes)} GB, {gigabytes(free)} GB are free; "
                "lower --batch-size or --seq-len"
            )
    if output_dir is not None:
        lines += map(str, disk_faults(output_dir, needed_bytes=prepared.checkpoint_bytes))
    if lines:
        raise DoesNotFitError("\n".join(lines))
