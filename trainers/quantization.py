"""`quantize`: check, quantize, verify the checkpoint in a fresh process, evaluate it, and write the report.

All errors are reported together, before weights are read or files are written.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..ds_configs.plan.output import disk_errors, output_errors, reserved, write_files
from ..ds_configs.quantization.layers import LinearLayer
from ..ds_configs.quantization.scheme import METHODS, MethodName, QuantizationScheme, needs_calibration
from ..ds_configs.quantization.settings import QuantizeSettings, ResolvedQuantization
from ..ds_configs.quantization.sizes import QuantizationMemory, QuantizationRun, tensor_bytes
from ..ds_configs.specs.errors import ConfigError, DoesNotFitError, ShardwrightError, UsageError, collecting
from ..ds_configs.specs.settings import settings_of
from ..ds_configs.specs.units import gigabytes
from ..plugins.huggingface_hub import split_revision
from ..plugins.llm_compressor import load_for_quantization, without_bars
from ..plugins.planning import installed_versions
from ..plugins.safetensors import appearing_directory
from ..plugins.transformers.meta_model import QuantizationSource, QuantizedModel, open_source
from .data.chat import set_chat_template
from .data.models import CHAT_TEMPLATE, StartingModel, copy_companions, load_tokenizer
from .data.samples import Samples, load_samples
from .data.sources import local_place
from .evaluation.evaluate import DEFAULT_WINDOWS, Evaluation, default_device, evaluate_model
from .evaluation.measures import TextRequest, TextWindows
from .formats.spqr import (
    SMALL_DIRECTORY,
    LowRankOptions,
    SmallMatrix,
    SpQROptions,
    low_rank_residual,
    save_small_format,
    spqr_quantize,
)
from .reports.report import markdown
from .reports.runs import REPORT_FILE as HTML_FILE
from .reports.runs import quantization_report, write_html
from .runs.settings import REPORT_FILE
from .verify import (
    PROBE_ROWS,
    PROBE_TOKENS,
    Verification,
    arbitrary_rows,
    discard_failed,
    fail_output,
    reference_logits,
)

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
        checkpoint_bytes=replace(resolved, layers=source.stored(resolved.layers)).checkpoint_bytes(
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


def needs_llm_compressor(method: MethodName, scheme: QuantizationScheme, layers: Sequence[LinearLayer]) -> bool:
    """Return whether a method needs llm-compressor, of the extra `quantize`, to quantize these layers.

    Rounding needs it only for ranges of activations and for experts, which it turns into linear layers.
    """
    rounds = method == "rtn" and not scheme.activations_are_static and not any(layer.is_expert for layer in layers)
    return method != "bitsandbytes" and not rounds


def missing_engine_errors(
    method: MethodName, scheme: QuantizationScheme, layers: Sequence[LinearLayer]
) -> list[ConfigError]:
    """Return the error of a package that a method needs and that is not installed."""
    if not needs_llm_compressor(method, scheme, layers) or find_spec("llmcompressor") is not None:
        return []
    fix = (
        "run pip install 'shardwright[quantize]', in a separate environment if this one has newer releases of torch "
        "or transformers; --method rtn and bitsandbytes need neither"
    )
    return [ConfigError(where="method", value=method, rule="needs llmcompressor, which is not installed", fix=fix)]


@dataclass(kw_only=True)
class SmallFormatModel:
    """A model with its quantized matrices; its weights in memory are their dequantized values."""

    model: Any
    """Transformers model."""
    matrices: Mapping[str, SmallMatrix]
    """Quantized matrices by module name."""

    @property
    def quantized_layers(self) -> tuple[str, ...]:
        return tuple(self.matrices)

    def save(self, directory: Path) -> None:
        """Write a dense checkpoint, which Transformers and vLLM load, and the small format in `small/`."""
        self.model.save_pretrained(directory)
        save_small_format(self.model, self.matrices, Path(directory) / SMALL_DIRECTORY)


def quantize_to_small_format(
    model: Any,
    scheme: QuantizationScheme,
    *,
    method: MethodName,
    layers: Sequence[str],
    calibration: Sequence[Mapping[str, Sequence[int]]],
    batch_size: int,
    options: Mapping[str, Any],
) -> SmallFormatModel:
    """Quantize linear layers of a model by SpQR or low-rank correction, in place.

    SpQR takes bits and group size from the scheme, but not the group size 128, which is too large for SpQR. Low-rank
    correction uses all weight settings of the scheme.

    Raises:
        UsageError: unknown options, values out of range, or no samples.
        RefusedInputError: weights or inputs contain NaN or infinity.
    """
    from ..plugins.llm_compressor import visit_layers

    weights = scheme.weights
    kind: type[SpQROptions] | type[LowRankOptions] = LowRankOptions
    from_scheme = {"bits": weights.bits, "group_size": weights.group_size or -1, "symmetric": weights.symmetric}
    rule, fix = "is set by the scheme", "use --scheme, --group-size or symmetric"
    errors = [
        ConfigError(where=name, value=options[name], rule=rule, fix=fix) for name in from_scheme if name in options
    ]
    if method == "spqr":
        kind = SpQROptions
        del from_scheme["symmetric"]
        if weights.group_size in (None, 128):
            del from_scheme["group_size"]
    with collecting(errors):
        selected = settings_of(kind, {**options, **from_scheme})
    if errors:
        raise UsageError(errors)
    if not calibration:
        rule, fix = f"{method} needs text for calibration", "pass --dataset, such as python-help"
        raise UsageError(ConfigError(where="dataset", rule=rule, fix=fix))
    matrices: dict[str, SmallMatrix] = {}

    def visit(name: str, weight_OI: Any, hessian_II: Any) -> Any:
        if isinstance(selected, SpQROptions):
            matrices[name] = spqr_quantize(weight_OI, hessian_II, selected)
        else:
            matrices[name] = low_rank_residual(weight_OI, hessian_II, selected)
        return matrices[name].dequantize()

    visit_layers(model, layers, calibration=calibration, batch_size=batch_size, visit=visit)
    return SmallFormatModel(model=model, matrices={name: matrices[name] for name in layers})


SCHEMA_VERSION = 1
"""Version of `quantize --format json` and of `quantization.json`."""
RESULT_FILE = "quantization.json"


@dataclass(frozen=True, kw_only=True)
class QuantizationOutcome:
    """A quantization whose checkpoint passed verification."""

    prepared: Prepared
    quantized_layers: tuple[str, ...]
    """Names of the quantized matrices."""
    verification: Verification
    """Result of reloading the checkpoint in a fresh process."""
    evaluation: Evaluation | None
    """Comparison of the checkpoint with its model; `None` if not requested or failed."""
    seconds: Mapping[str, float]
    """Wall-clock time per stage."""
    command: str = ""
    """Command line; empty when called from Python."""

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as JSON values."""
        prepared, samples = self.prepared, self.prepared.calibration
        calibration = {
            "source": prepared.settings.dataset,
            "samples": len(samples),
            "tokens": sum(len(sample["input_ids"]) for sample in samples),
            "seq_len": prepared.seq_len,
        }
        return {
            "schema_version": SCHEMA_VERSION,
            "model": prepared.source.name,
            "revision": prepared.source.revision,
            "scheme": asdict(prepared.scheme) | {"format": prepared.scheme.format},
            "method": prepared.resolved.method,
            "method_reason": prepared.resolved.method_reason,
            "settings": prepared.settings.model_dump(),
            "calibration": calibration if samples else None,
            "quantized_layers": list(self.quantized_layers),
            "memory_estimate": asdict(prepared.memory),
            "checkpoint_bytes": prepared.checkpoint_bytes,
            "verification": asdict(self.verification),
            "evaluation": None if self.evaluation is None else self.evaluation.to_dict(),
            "seconds": {name: round(value, 2) for name, value in self.seconds.items()},
            "versions": dict(installed_versions()),
            "command": self.command,
        }


QUANTIZATION_FILES = (REPORT_FILE, RESULT_FILE, HTML_FILE)
"""Files of a quantization, in addition to weights, configuration and tokenizer."""


def quantize_in_memory(prepared: Prepared, *, device: str) -> QuantizedModel:
    """Load the model and quantize it by the selected method.

    Raises:
        ShardwrightError: the model cannot be loaded, or the engine rejects it.
    """
    settings, source, scheme, method = prepared.settings, prepared.source, prepared.scheme, prepared.resolved.method
    engine = METHODS[method].engine
    if engine == "bitsandbytes":
        from ..plugins.bitsandbytes import quantize_with_bitsandbytes

        selected = {layer.name for layer in prepared.layers}
        return quantize_with_bitsandbytes(
            source.directory,
            scheme,
            quantized=selected,
            dense=[layer.name for layer in source.layers if layer.name not in selected],
            dtype=source.dtype,
            device=device,
        )
    model = load_for_quantization(source)
    calibrated: dict[str, Any] = {"calibration": prepared.calibration, "batch_size": settings.batch_size}
    if engine == "shardwright":
        layers = [layer.name for layer in prepared.layers]
        return quantize_to_small_format(
            model, scheme, method=method, layers=layers, options=settings.method_options, **calibrated
        )
    if not needs_llm_compressor(method, scheme, prepared.layers):
        from ..plugins.compressed_tensors import round_to_nearest

        return round_to_nearest(model, scheme, stored_names=source.tensors.keys())
    from ..plugins.llm_compressor import quantize_with_llm_compressor

    return quantize_with_llm_compressor(
        model,
        scheme,
        method,  # type: ignore[arg-type]
        method_options=settings.method_options,
        seed=settings.seed,
        stored_names=source.tensors.keys(),
        **calibrated,
    )


def quantize(
    model: str,
    output_dir: str | Path,
    *,
    revision: str | None = None,
    device: str | None = None,
    force: bool = False,
    evaluate: bool = True,
    **settings: Any,
) -> QuantizationOutcome:
    """Quantize a model, and write a checkpoint that was verified by reloading it.

    Warnings and progress are logged. Example:
    ``shardwright.quantize("taught", "taught-w4", scheme="W4A16", dataset="python-help")``

    Args:
        model: Hub id or directory of a model.
        output_dir: Directory of the checkpoint.
        revision: Branch, tag or commit of a Hub model.
        device: Such as `cuda:0`; default: an accelerator if there is one.
        force: Replace the model in a directory that is not empty.
        evaluate: Compare the checkpoint with its model.
        settings: Fields of `QuantizeSettings`, which are flags of `shardwright quantize`.

    Raises:
        UsageError: all errors in the settings.
        RefusedInputError: files of the model are unsafe, corrupt or already quantized.
        DoesNotFitError: not enough memory or disk.
        ShardwrightError: verification failed; the checkpoint is renamed to `*.failed`.
    """
    output = Path(output_dir)
    prepared = prepare(
        model, settings_of(QuantizeSettings, settings), output, revision=revision, device=device, force=force
    )
    return run_prepared(prepared, output, force=force, device=device, evaluate=evaluate)


def run_prepared(
    prepared: Prepared,
    output_dir: Path,
    *,
    force: bool = False,
    device: str | None = None,
    evaluate: bool = True,
    command: str = "",
) -> QuantizationOutcome:
    """Quantize, write, verify, evaluate and report; an interrupted run leaves nothing.

    Raises:
        ShardwrightError: a step failed; the message names it and the cause.
    """
    seconds: dict[str, float] = {}

    @contextmanager
    def timed(stage: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        seconds[stage] = time.monotonic() - began

    with reserved(output_dir, force=force):
        with without_bars(), appearing_directory(output_dir) as staging:
            with timed("quantizing"):
                quantized = quantize_in_memory(prepared, device=device or default_device())
            with timed("writing"):
                samples = prepared.samples
                rows = arbitrary_rows(len(prepared.tokenizer), prepared.source.longest)
                if samples is not None and (held_out := samples.evaluation or samples.train):
                    rows = [list(sample["input_ids"][:PROBE_TOKENS]) for sample in held_out[:PROBE_ROWS]]
                reference, layers = reference_logits(quantized.model, rows), quantized.quantized_layers
                quantized.save(staging)
                copy_companions(prepared.source.directory, staging)
                if prepared.settings.chat_template is not None:
                    (staging / CHAT_TEMPLATE).write_text(prepared.tokenizer.chat_template, encoding="utf-8")
                del quantized
            with timed("verifying"):
                # SpQR and low-rank checkpoints also contain a dense export, which is what loaders read.
                is_own = METHODS[prepared.resolved.method].engine == "shardwright"
                verification = reference.verify(
                    staging,
                    layers=prepared.source.stored(prepared.layers),
                    scheme=None if is_own else prepared.scheme,
                    expected_bytes=None if is_own else prepared.checkpoint_bytes,
                )
            if not verification.passed:
                failed = fail_output(staging, output_dir, verification)
                raise ShardwrightError(
                    f"the checkpoint did not pass verification: {verification.reason}; it was moved to {failed}, and "
                    f"nothing was written to {output_dir}"
                )
        discard_failed(output_dir)
        evaluation = None
        if evaluate:
            text: TextRequest | TextWindows = TextRequest(num_samples=DEFAULT_WINDOWS)
            if samples is not None and samples.evaluation:
                text = TextWindows(
                    windows=tuple(samples.evaluation[:DEFAULT_WINDOWS]),
                    source=f"{samples.statistics.source}, rows not used for calibration",
                    seq_len_tokens=prepared.seq_len,
                    available_windows=len(samples.evaluation),
                )
            packed, baseline = output_dir / SMALL_DIRECTORY, str(prepared.source.directory)
            with timed("evaluating"):
                try:
                    written = str(packed if packed.is_dir() else output_dir)
                    evaluation = evaluate_model(written, baseline=baseline, text=text, device=device)
                except ShardwrightError as error:
                    logger.info(f"the checkpoint is written and verified, but could not be evaluated: {error}")
        outcome = QuantizationOutcome(
            prepared=prepared,
            quantized_layers=layers,
            verification=verification,
            evaluation=evaluation,
            seconds=seconds,
            command=command,
        )
        numbers = json.dumps(outcome.to_dict(), indent=2, default=str) + "\n"
        report = markdown(quantization_report(json.loads(numbers)))
        files = {REPORT_FILE: report, RESULT_FILE: numbers}
        write_files(files, output_dir, force=True)
        # The checkpoint is written and verified: a report that cannot be drawn is no reason to fail.
        write_html(output_dir, must=False)
    return outcome
