"""Quantizes a prepared model, proves that what was written loads and computes the same, and reports what it cost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...ds_configs.plan.output import reserved
from ...ds_configs.plan.write import write_files
from ...ds_configs.quantization.methods import METHODS
from ...ds_configs.quantization.recipe import quantize_settings, read_recipe
from ...ds_configs.specs.errors import ShardwrightError
from ...plugins.huggingface_hub.push import check_push, pushed
from ...plugins.launching.notes import Notify, OnProgress
from ...plugins.llm_compressor.quiet import without_bars
from ...plugins.safetensors.writing import appearing_directory
from ...plugins.transformers.quantized_model import ReportProgress
from ..evaluation.evaluate import DEFAULT_WINDOWS, evaluate_model
from ..evaluation.inputs import default_device
from ..evaluation.result import Evaluation
from ..evaluation.text_windows import TextRequest, TextWindows
from ..formats.model_directory import copy_companions
from ..formats.spqr_format import SMALL_DIRECTORY
from ..reports.make import write_html
from ..verify.checkpoint import (
    PROBE_ROWS,
    PROBE_TOKENS,
    UNPROVEN,
    ReferenceLogits,
    Verification,
    arbitrary_rows,
    discard_failed,
    fail_output,
    reference_logits,
)
from .engines import quantize_in_memory
from .inputs import Prepared, prepare
from .journal import discard_journal, journal_directory
from .report import QuantizationOutcome, quantization_files


def quantize(
    model: str,
    output_dir: str | Path,
    *,
    recipe: str | None = None,
    revision: str | None = None,
    device: str | None = None,
    force: bool = False,
    resume: bool = False,
    evaluate: bool = True,
    push_to_hub: str | None = None,
    private: bool = False,
    notify: Notify = lambda _: None,
    **settings: Any,
) -> QuantizationOutcome:
    """Quantize a model and write a checkpoint that was proven to load.

    Example: ``shardwright.quantize("taught", "taught-w4", scheme="W4A16", dataset="python-help")``

    Args:
        model: Hub id or directory.
        output_dir: Where the checkpoint goes.
        recipe: Name of a recipe, or a YAML file.
        revision: Branch, tag or commit of a Hub model.
        device: Such as `cuda:0`; default: an accelerator where there is one.
        force: Replace the model in a directory that is not empty.
        resume: Go on from the journal of an interrupted run.
        evaluate: Compare with the model that it was made from.
        push_to_hub: Hub repository that gets the checkpoint in the end.
        private: Make it private where it is new.
        notify: Receives remarks.
        settings: Fields of `QuantizeSettings`, which come before the recipe.

    Raises:
        UsageError: everything wrong with the settings.
        RefusedInputError: files of the model are unsafe, corrupt or quantized already.
        DoesNotFitError: memory or disk is too small.
        ShardwrightError: the checkpoint did not pass its checks; it lies under a `.failed` name.
    """
    check_push(push_to_hub)
    merged = quantize_settings(settings, recipe=None if recipe is None else read_recipe(recipe))
    place = Path(output_dir)
    how = {"revision": revision, "device": device, "force": force, "resume": resume}
    prepared = prepare(model, merged, place, notify=notify, **how)  # type: ignore[arg-type]
    with pushed(place, push_to_hub, private=private, notify=notify):
        return run_prepared(
            prepared, place, resume=resume, force=force, device=device, evaluate=evaluate, notify=notify
        )


def run_prepared(
    prepared: Prepared,
    output_dir: Path,
    *,
    resume: bool = False,
    force: bool = False,
    device: str | None = None,
    evaluate: bool = True,
    notify: Notify = lambda _: None,
    report: ReportProgress = lambda _: None,
    on_evaluation: OnProgress = lambda _stage, _done, _total: None,
    command: str = "",
) -> QuantizationOutcome:
    """Quantize, write, verify, evaluate and report; an interrupted run leaves its journal and nothing else.

    Raises:
        ShardwrightError: a step failed; says which and why.
    """
    with reserved(output_dir, force=force):
        return _run(
            prepared, output_dir, resume=resume, device=device, evaluate=evaluate, notify=notify,
            report=report, on_evaluation=on_evaluation, command=command,
        )  # fmt: skip


def _run(
    prepared: Prepared,
    output_dir: Path,
    *,
    resume: bool,
    device: str | None,
    evaluate: bool,
    notify: Notify,
    report: ReportProgress,
    on_evaluation: OnProgress,
    command: str,
) -> QuantizationOutcome:
    seconds: dict[str, float] = {}
    if not resume:
        discard_journal(output_dir)
    with without_bars(), appearing_directory(output_dir) as staging:
        with _timed(seconds, "quantizing"):
            quantized = quantize_in_memory(
                prepared, journal=journal_directory(output_dir), device=device or default_device(), report=report
            )
        with _timed(seconds, "writing"):
            reference = reference_logits(quantized.model, verification_tokens(prepared))
            layers = quantized.quantized_layers
            loads = getattr(quantized, "loads_in_transformers", True)
            quantized.save(staging)
            copy_companions(prepared.source.directory, staging)
            del quantized
        with _timed(seconds, "verifying"):
            verification = _verified(prepared, staging, reference) if loads else UNPROVEN
        if not verification.passed:
            discard_journal(output_dir)
            kept = fail_output(staging, output_dir, verification)
            raise ShardwrightError(
                f"the checkpoint did not pass: {verification.reason}; it lies in {kept}, and nothing was written to "
                f"{output_dir}"
            )
    if not loads:
        notify("Transformers does not load this format without optimum or gptqmodel: it was not reloaded")
    discard_journal(output_dir)
    discard_failed(output_dir, notify)
    evaluation = None
    if evaluate and loads:
        with _timed(seconds, "evaluating"):
            evaluation = _evaluation(prepared, output_dir, device, notify, on_evaluation)
    outcome = QuantizationOutcome(
        prepared=prepared,
        quantized_layers=layers,
        verification=verification,
        evaluation=evaluation,
        seconds=seconds,
        command=command,
    )
    write_files(quantization_files(outcome), output_dir, force=True)
    try:
        write_html(output_dir)
    except ShardwrightError as error:
        # The checkpoint is written and verified: that its report cannot be drawn is no reason to fail.
        notify(f"report.html was not written: {error}")
    return outcome


def _verified(prepared: Prepared, staging: Path, reference: ReferenceLogits) -> Verification:
    """Verify the checkpoint; own formats lie beside a dense export, which is what loaders read."""
    engine = METHODS[prepared.resolved.method].engine
    return reference.verify(
        staging,
        layers=prepared.layers,
        scheme=None if engine == "shardwright" else prepared.scheme,
        expected_bytes=prepared.checkpoint_bytes if engine in ("llm-compressor", "bitsandbytes") else None,
    )


def verification_tokens(prepared: Prepared) -> list[list[int]]:
    """Return the tokens that the checkpoint must answer as the model in memory does: held-out text, else any."""
    if prepared.samples is not None and (prepared.samples.evaluation or prepared.samples.train):
        samples = prepared.samples.evaluation or prepared.samples.train
        return [list(sample["input_ids"][:PROBE_TOKENS]) for sample in samples[:PROBE_ROWS]]
    return arbitrary_rows(len(prepared.tokenizer), prepared.source.longest)


def _evaluation(
    prepared: Prepared, output_dir: Path, device: str | None, notify: Notify, on_progress: OnProgress
) -> Evaluation | None:
    text: TextRequest | TextWindows = TextRequest(num_samples=DEFAULT_WINDOWS)
    samples = prepared.samples
    if samples is not None and samples.evaluation:
        windows = tuple(samples.evaluation[:DEFAULT_WINDOWS])
        text = TextWindows(
            windows=windows,
            source=f"{samples.statistics.source}, rows that no scale was found on",
            seq_len_tokens=prepared.seq_len,
            stride_tokens=prepared.seq_len,
            available_windows=len(samples.evaluation),
        )
    packed = output_dir / SMALL_DIRECTORY
    try:
        return evaluate_model(
            str(packed if packed.is_dir() else output_dir),
            baseline=str(prepared.source.directory),
            text=text,
            device=device,
            notify=notify,
            on_progress=on_progress,
        )
    except ShardwrightError as error:
        notify(f"the checkpoint is written and verified, and could not be evaluated: {error}")
        return None


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    began = time.monotonic()
    try:
        yield
    finally:
        seconds[name] = time.monotonic() - began
