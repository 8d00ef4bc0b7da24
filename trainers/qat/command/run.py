"""Calibrates, launches a prepared quantization-aware training, follows it, and reports what it gave."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from ....ds_configs.plan.write import write_files
from ...data.samples import Sample
from ...runs.inputs import Notify
from ...runs.launch import OnStep, arguments_of, compile_operators, job_fields, launch, write_samples
from ...runs.report import read_metrics
from ...runs.settings import PLAN_DIRECTORY, RESULT_FILE, TOKENIZER
from .inputs import Prepared
from .request import RANGES_FILE, QATJob
from .run_report import Outcome, RunResult, report_files

_WORKER = f"{__package__}.worker"
_SAMPLES_AT_ONCE = 8


def run_qat(prepared: Prepared, output_dir: Path, *, resume: bool, notify: Notify, on_step: OnStep) -> Outcome:
    """Launch a prepared training, wait for it, and write the report beside the checkpoint.

    Raises:
        ShardwrightError: a rank failed; says which and why.
    """
    started = time.monotonic()
    plan, samples = prepared.plan, prepared.samples
    with tempfile.TemporaryDirectory(prefix="shardwright-qat-", ignore_cleanup_errors=True) as directory:
        work = Path(directory)
        # A checkpoint holds the ranges that its training began with.
        calibrates = prepared.needs_calibration and not resume
        if calibrates:
            calibrate(prepared, work / RANGES_FILE, notify)
        plan_directory = output_dir.absolute() / PLAN_DIRECTORY
        plan.write(plan_directory, force=True)
        compile_operators(plan, notify)
        write_samples(samples, work)
        prepared.tokenizer.save_pretrained(str(work / TOKENIZER))
        job = QATJob(
            settings=prepared.settings,
            model=prepared.source.name,
            source_directory=str(prepared.source.directory.absolute()),
            stored_dtype=prepared.source.dtype,
            training_arguments=arguments_of(prepared.settings, plan, samples, output_dir),
            teacher=prepared.teacher,
            vocab_size=prepared.vocab_size,
            calibrated=calibrates,
            **job_fields(plan, samples, output_dir, resume=resume),
        )
        launch(_WORKER, job, plan, plan_directory, work, on_step)
        result = RunResult(**json.loads((work / RESULT_FILE).read_text(encoding="utf-8")))
    outcome = Outcome(
        settings=prepared.settings,
        model=prepared.source.name,
        teacher=prepared.teacher,
        scheme=prepared.config.rounded_scheme,
        layers=len(prepared.layers),
        plan=plan,
        statistics=samples.statistics,
        result=result,
        metrics=read_metrics(output_dir),
        seconds=time.monotonic() - started,
    )
    write_files(report_files(outcome), output_dir, force=True)
    return outcome


def calibrate(prepared: Prepared, file: Path, notify: Notify) -> None:
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
