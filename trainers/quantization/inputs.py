"""Checks of a quantization before weights are read or files are written; all errors are reported together."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...ds_configs.plan.output import disk_errors, output_errors
from ...ds_configs.quantization.layers import LinearLayer
from ...ds_configs.quantization.scheme import MethodName, QuantizationScheme, needs_calibration
from ...ds_configs.quantization.settings import QuantizeSettings, ResolvedQuantization
from ...ds_configs.quantization.sizes import QuantizationMemory, QuantizationRun, tensor_bytes
from ...ds_configs.specs.errors import ConfigError, DoesNotFitError, ShardwrightError, UsageError, collecting
from ...ds_configs.specs.settings import settings_of
from ...ds_configs.specs.units import gigabytes
from ...plugins.huggingface_hub import split_revision
from ...plugins.transformers.meta_model import QuantizationSource, open_source
from ..data.chat import set_chat_template
from ..data.models import StartingModel, load_tokenizer
from ..data.samples import Samples, load_samples
from ..data.sources import local_place
from ..evaluation.evaluate import default_device

logger = logging.getLogger(__name__)


_HELD_OUT = 0.1
"""Fraction of the dataset's rows that is reserved for the evaluation."""
_FEWEST_USEFUL_TOKENS = 1024
"""Fewer calibration tokens give noisy ranges and second moments, and a warning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A quantization that is ready to run; nothing has been written for it."""

    settings: QuantizeSettings
    source: QuantizationSource
    """Files of the model."""
    resolved: ResolvedQuantization
    """Scheme, method and its reason, and the layers to quantize in this model."""
    tokenizer: Any
    samples: Samples | None
    """Calibration and held-out samples; `None` without a dataset."""
    seq_len: int
    """Tokens per sample."""
    memory: QuantizationMemory
    """Estimate of the peak memory."""
    checkpoint_bytes: int
    """Size of the weights in the checkpoint."""

    @property
    def scheme(self) -> QuantizationScheme:
        """The scheme, with layers of this model that stay dense in `ignore`."""
        return self.resolved.scheme

    @property
    def layers(self) -> tuple[LinearLayer, ...]:
        """Layers to quantize."""
        return self.resolved.layers

    @property
    def calibration(self) -> Sequence[dict[str, list[int]]]:
        """Calibration samples; empty if the method needs none."""
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
) -> Prepared:
    """Check settings, model and dataset, and estimate memory; warnings are logged.

    Raises:
        UsageError: invalid or contradictory settings, unsuitable shapes or text; all errors together.
        RefusedInputError: files of the model are corrupt, unsafe or already quantized.
        DoesNotFitError: not enough memory or disk.
        ShardwrightError: the Hub cannot be reached.
    """
    import psutil
    import torch

    errors: list[ConfigError] = []
    if output_dir is not None:
        sources = {"the model": model, "the dataset": local_place(settings.dataset)}
        errors += output_errors(output_dir, force=force, sources=sources)
    resolved = source = None
    with collecting(errors):
        resolved = settings.resolved()
    with collecting(errors):
        model, revision = split_revision(model, revision)
        source = open_source(model, revision=revision)
    if resolved is not None:
        layers = () if source is None else source.layers
        errors += missing_engine_errors(resolved.method, resolved.scheme, layers)
    if source is None or resolved is None:
        raise UsageError(errors)
    resolved = resolved.of_layers(
        source.layers, default_ignore=source.default_ignore if settings.ignore is None else None
    )
    errors += resolved.errors()
    samples, tokenizer = None, None
    seq_len = min(settings.seq_len, source.longest or settings.seq_len)
    with collecting(errors):
        tokenizer = load_tokenizer(StartingModel(model=str(source.directory)), source.dimensions.vocab_size)
        set_chat_template(tokenizer, settings.chat_template)
        if settings.dataset is not None:
            samples = load_samples(
                settings.dataset, tokenizer, seq_len=seq_len, seed=settings.seed, evaluation_fraction=_HELD_OUT
            )
    if errors:
        raise UsageError(errors)
    if seq_len < settings.seq_len:
        requested = f", not {settings.seq_len}" if "seq_len" in settings.model_fields_set else ""
        logger.info(f"samples have {seq_len} tokens{requested}, the maximum of the model")
    if samples is not None:
        count = len(samples.train)
        if count < settings.num_samples:
            logger.info(f"{settings.dataset} has {count} samples of {seq_len} tokens, not {settings.num_samples}")
        if min(count, settings.num_samples) * seq_len < _FEWEST_USEFUL_TOKENS:
            logger.info("the calibration text is very short: ranges and second moments will be noisy")
    for warning in resolved.warnings():
        logger.info(warning)
    prepared = Prepared(
        settings=settings,
        source=source,
        resolved=resolved,
        tokenizer=tokenizer,
        samples=samples,
        seq_len=seq_len,
        memory=QuantizationRun(
            layers=resolved.layers,
            scheme=resolved.scheme,
            method=resolved.method,
            dimensions=source.dimensions,
            weight_bytes=tensor_bytes(source.tensors.values()),
            num_samples=settings.num_samples if samples is None else min(settings.num_samples, len(samples.train)),
            seq_len=seq_len,
            batch_size=settings.batch_size,
            device="cpu" if (device or default_device()) == "cpu" else "cuda",
            dtype=source.dtype,
        ).memory(),
        checkpoint_bytes=resolved.checkpoint_bytes(
            source.tensors, dtype=source.dtype, kept_in_fp32=source.kept_in_fp32
        ),
    )
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
        lines += map(str, disk_errors(output_dir, needed_bytes=prepared.checkpoint_bytes))
    if lines:
        raise DoesNotFitError("\n".join(lines))
    return prepared


def suggested_command(directory: Path) -> list[str]:
    """Return the command that quantizes the model in a directory, to 4 bits if its widths allow it; empty if none does.

    It needs no dataset, and only packages that are installed.
    """
    try:
        source = open_source(str(directory))
    except ShardwrightError:
        return []
    # vLLM has kernels for these groups.
    for scheme, group_size in (("W4A16", None), ("W4A16", 64), ("W4A16", 32), ("W8A16", -1), ("NF4", None)):
        resolved = settings_of(QuantizeSettings, {"scheme": scheme, "group_size": group_size}).resolved()
        resolved = resolved.of_layers(source.layers, default_ignore=source.default_ignore)
        unpacked = resolved.method == "bitsandbytes" and any(layer.is_expert for layer in resolved.layers)
        missing = missing_engine_errors(resolved.method, resolved.scheme, resolved.layers)
        if not unpacked and not missing and not resolved.errors():
            flags = ["--scheme", scheme, *(() if group_size is None else ("--group-size", str(group_size)))]
            output_dir = f"{directory}-{'w8' if scheme == 'W8A16' else 'w4'}"
            return ["shardwright", "quantize", str(directory), *flags, "--output-dir", output_dir]
    return []


def engine_packages(method: MethodName, scheme: QuantizationScheme, layers: Sequence[LinearLayer]) -> tuple[str, ...]:
    """Return the import names of the extra `quantize` that a method needs to quantize these layers.

    Rounding needs llm-compressor only for ranges of activations and for experts, which it turns into linear layers.
    """
    if method == "bitsandbytes":
        return ()
    if method == "rtn" and not scheme.activations_are_static and not any(layer.is_expert for layer in layers):
        return ()
    return ("llmcompressor",)


def missing_engine_errors(
    method: MethodName, scheme: QuantizationScheme, layers: Sequence[LinearLayer]
) -> list[ConfigError]:
    """Return the errors of packages that a method needs and that are not installed."""
    fix = (
        "run pip install 'shardwright[quantize]', in a separate environment if this one has newer releases of torch "
        "or transformers; --method rtn and bitsandbytes need neither"
    )
    return [
        ConfigError(where="method", value=method, rule=f"needs {package}, which is not installed", fix=fix)
        for package in engine_packages(method, scheme, layers)
        if find_spec(package) is None
    ]
