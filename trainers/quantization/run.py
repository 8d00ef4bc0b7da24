"""Quantize a prepared model, verify the checkpoint in a fresh process, evaluate it, and write the report."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...ds_configs.plan.output import reserved, write_files
from ...ds_configs.quantization.scheme import METHODS, MethodName, QuantizationScheme
from ...ds_configs.quantization.settings import QuantizeSettings
from ...ds_configs.specs.errors import ConfigError, ShardwrightError, UsageError, collecting
from ...ds_configs.specs.settings import settings_of
from ...plugins.huggingface_hub import CARD_FILE, check_push, pushed, shown_name, title_of
from ...plugins.llm_compressor import load_for_quantization, without_bars
from ...plugins.planning import installed_versions
from ...plugins.safetensors import appearing_directory
from ...plugins.transformers.meta_model import QuantizedModel
from ..data.models import CHAT_TEMPLATE, copy_companions
from ..evaluation.evaluate import DEFAULT_WINDOWS, Evaluation, default_device, evaluate_model
from ..evaluation.measures import TextRequest, TextWindows
from ..formats.spqr import (
    SMALL_DIRECTORY,
    LowRankOptions,
    SmallMatrix,
    SpQROptions,
    low_rank_residual,
    save_small_format,
    spqr_quantize,
)
from ..reports.make import REPORT_FILE as HTML_FILE
from ..reports.make import write_html
from ..reports.report import card_text, code, license_line, markdown, usage
from ..reports.runs import quantization_report, serving_text
from ..runs.settings import REPORT_FILE
from ..verify import (
    PROBE_ROWS,
    PROBE_TOKENS,
    Verification,
    arbitrary_rows,
    discard_failed,
    fail_output,
    reference_logits,
)
from .inputs import Prepared, engine_packages, prepare


@dataclass(kw_only=True)
class SmallFormatModel:
    """A model with its quantized matrices; its weights in memory are their dequantized values."""

    model: Any
    """Transformers model."""
    matrices: Mapping[str, SmallMatrix]
    """Quantized matrices by module name."""

    @property
    def quantized_layers(self) -> tuple[str, ...]:
        """Names of the quantized layers."""
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

    Args:
        model: Transformers model with dense weights.
        scheme: Number format of the weights.
        method: `spqr` or `low-rank`.
        layers: Names of plain linear layers to quantize.
        calibration: Samples with `input_ids`.
        batch_size: Samples per forward pass.
        options: Fields of `SpQROptions` or `LowRankOptions`.

    Raises:
        UsageError: unknown options, values out of range, or no samples.
        RefusedInputError: weights or inputs contain NaN or infinity.
    """
    from ...plugins.llm_compressor import visit_layers

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


logger = logging.getLogger(__name__)

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

    def card(self) -> str:
        """Return the checkpoint's `README.md`, with the metadata that the Hub reads."""
        source, scheme, method = self.prepared.source, self.prepared.scheme, self.prepared.resolved.method
        commit = f" at {code(source.revision)}" if source.revision else ""
        origin = f"{code(shown_name(source.name))}{commit}"
        lead = f"Quantized from {origin} by {method}. [REPORT.md](REPORT.md) shows the change in quality."
        return card_text(
            f"{title_of(source.name)}, {scheme.name}",
            [lead, serving_text(method, scheme.storage), usage()],
            f"{license_line(source.name)} Read its card before you publish this one.",
            base=source.name,
            relation="quantized",
            tags=(scheme.storage, method),
        )

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


QUANTIZATION_FILES = (CARD_FILE, REPORT_FILE, RESULT_FILE, HTML_FILE)
"""Files of a quantization, in addition to weights, configuration and tokenizer."""


def quantize_in_memory(prepared: Prepared, *, device: str) -> QuantizedModel:
    """Load the model and quantize it by the selected method.

    Raises:
        ShardwrightError: the model cannot be loaded, or the engine rejects it.
    """
    settings, source, scheme, method = prepared.settings, prepared.source, prepared.scheme, prepared.resolved.method
    engine = METHODS[method].engine
    if engine == "bitsandbytes":
        from ...plugins.bitsandbytes import quantize_with_bitsandbytes

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
    if not engine_packages(method, scheme, prepared.layers):
        from ...plugins.compressed_tensors import round_to_nearest

        return round_to_nearest(model, scheme, stored_names=source.tensors.keys())
    from ...plugins.llm_compressor import quantize_with_llm_compressor

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
    push_to_hub: str | None = None,
    private: bool = False,
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
        push_to_hub: Hub repository to upload the checkpoint to.
        private: Create the repository as private.
        settings: Fields of `QuantizeSettings`, which are flags of `shardwright quantize`.

    Raises:
        UsageError: all errors in the settings.
        RefusedInputError: files of the model are unsafe, corrupt or already quantized.
        DoesNotFitError: not enough memory or disk.
        ShardwrightError: verification failed; the checkpoint is renamed to `*.failed`.
    """
    check_push(push_to_hub)
    output = Path(output_dir)
    prepared = prepare(
        model, settings_of(QuantizeSettings, settings), output, revision=revision, device=device, force=force
    )
    with pushed(output, push_to_hub, private=private):
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
                    layers=prepared.layers,
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
        files = {REPORT_FILE: report, RESULT_FILE: numbers, CARD_FILE: outcome.card()}
        write_files(files, output_dir, force=True)
        try:
            write_html(output_dir)
        except ShardwrightError as error:
            # The checkpoint is written and verified: a report that cannot be drawn is no reason to fail.
            logger.info(f"{HTML_FILE} was not written: {error}")
    return outcome
