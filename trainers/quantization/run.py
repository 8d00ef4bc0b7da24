"""Quantizes a prepared model, verifies the checkpoint in a fresh process, evaluates it, and writes the report."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...ds_configs.plan.output import reserved, write_files
from ...ds_configs.quantization.scheme import METHODS
from ...ds_configs.quantization.settings import QuantizeSettings
from ...ds_configs.specs.errors import ShardwrightError
from ...ds_configs.specs.settings import settings_of
from ...plugins.huggingface_hub import CARD_FILE, check_push, pushed, shown_name, title_of
from ...plugins.llm_compressor.engine import load_for_quantization
from ...plugins.llm_compressor.quiet import without_bars
from ...plugins.planning import installed_versions
from ...plugins.safetensors import appearing_directory
from ...plugins.transformers.quantized_model import QuantizedModel
from ..data.models import CHAT_TEMPLATE, copy_companions
from ..evaluation.evaluate import DEFAULT_WINDOWS, Evaluation, default_device, evaluate_model
from ..evaluation.measures import TextRequest, TextWindows
from ..formats.spqr import SMALL_DIRECTORY
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


def _card(prepared: Prepared) -> str:
    """Return the checkpoint's `README.md`, with the metadata that the Hub reads."""
    source, scheme, method = prepared.source, prepared.scheme, prepared.resolved.method
    commit = f" at {code(source.revision)}" if source.revision else ""
    lead = (
        f"Quantized from {code(shown_name(source.name))}{commit} by {method}. [REPORT.md](REPORT.md) shows the change"
    )
    return card_text(
        f"{title_of(source.name)}, {scheme.name}",
        [f"{lead} in quality.", serving_text(method, scheme.storage), usage()],
        f"{license_line(source.name)} Read its card before you publish this one.",
        base=source.name,
        relation="quantized",
        tags=(scheme.storage, method),
    )


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
        from .spqr import quantize_to_small_format

        layers = [layer.name for layer in prepared.layers]
        return quantize_to_small_format(
            model, scheme, method=method, layers=layers, options=settings.method_options, **calibrated
        )
    if not engine_packages(method, scheme, prepared.layers):
        from ...plugins.compressed_tensors.compressed_model import round_to_nearest

        return round_to_nearest(model, scheme, stored_names=source.tensors.keys())
    from ...plugins.llm_compressor.engine import quantize_with_llm_compressor

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
            with timed("evaluating"):
                evaluation = _evaluation(prepared, output_dir, device)
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
        files = {REPORT_FILE: report, RESULT_FILE: numbers, CARD_FILE: _card(prepared)}
        write_files(files, output_dir, force=True)
        try:
            write_html(output_dir)
        except ShardwrightError as error:
            # The checkpoint is written and verified: a report that cannot be drawn is no reason to fail.
            logger.info(f"{HTML_FILE} was not written: {error}")
    return outcome


def _evaluation(prepared: Prepared, output_dir: Path, device: str | None) -> Evaluation | None:
    text: TextRequest | TextWindows = TextRequest(num_samples=DEFAULT_WINDOWS)
    samples = prepared.samples
    if samples is not None and samples.evaluation:
        text = TextWindows(
            windows=tuple(samples.evaluation[:DEFAULT_WINDOWS]),
            source=f"{samples.statistics.source}, rows not used for calibration",
            seq_len_tokens=prepared.seq_len,
            available_windows=len(samples.evaluation),
        )
    packed = output_dir / SMALL_DIRECTORY
    try:
        return evaluate_model(
            str(packed if packed.is_dir() else output_dir),
            baseline=str(prepared.source.directory),
            text=text,
            device=device,
        )
    except ShardwrightError as error:
        logger.info(f"the checkpoint is written and verified, but could not be evaluated: {error}")
        return None
