"""Launches a prepared distillation, follows it, and reports what became of the student."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

from ....ds_configs.plan.write import write_files
from ...runs.inputs import Notify
from ...runs.launch import OnStep, arguments_of, compile_operators, job_fields, launch, write_samples
from ...runs.report import read_metrics
from ...runs.settings import PLAN_DIRECTORY, RESULT_FILE, TOKENIZER
from .run_files import TEACHER_TOKENIZER, WorkerJob
from .run_inputs import Prepared
from .run_report import Outcome, RunResult, report_files

_WORKER = f"{__package__}.worker"


def distill(prepared: Prepared, output_dir: Path, *, resume: bool, notify: Notify, on_step: OnStep) -> Outcome:
    """Launch a prepared distillation, wait for it, and write the report beside the student.

    Raises:
        ShardwrightError: a rank failed; says which and why.
    """
    started = time.monotonic()
    plan_directory = output_dir.absolute() / PLAN_DIRECTORY
    prepared.plan.write(plan_directory, force=True)
    compile_operators(prepared.plan, notify)
    with tempfile.TemporaryDirectory(prefix="shardwright-distill-", ignore_cleanup_errors=True) as directory:
        work = Path(directory)
        write_samples(prepared.samples, work)
        prepared.tokenizer.save_pretrained(str(work / TOKENIZER))
        prepared.teacher_tokenizer.save_pretrained(str(work / TEACHER_TOKENIZER))
        job = _job(prepared, output_dir, resume=resume)
        launch(_WORKER, job, prepared.plan, plan_directory, work, on_step)
        result = RunResult(**json.loads((work / RESULT_FILE).read_text(encoding="utf-8")))
    outcome = Outcome(
        settings=prepared.settings,
        teacher=prepared.teacher,
        student=prepared.student,
        plan=prepared.plan,
        statistics=prepared.samples.statistics,
        result=result,
        metrics=read_metrics(output_dir),
        seconds=time.monotonic() - started,
    )
    write_files(report_files(outcome), output_dir, force=True)
    return outcome


def _job(prepared: Prepared, output_dir: Path, *, resume: bool) -> WorkerJob:
    plan, samples = prepared.plan, prepared.samples
    cache = prepared.settings.teacher_cache
    settings = {"teacher_cache": str(Path(cache).absolute())} if cache else {}
    return WorkerJob(
        settings=prepared.settings.model_copy(update=settings),
        teacher=prepared.teacher,
        student=prepared.student,
        training_arguments=arguments_of(prepared.settings, plan, samples, output_dir) | {"eval_on_start": True},
        vocab_size=prepared.vocab_size,
        **job_fields(plan, samples, output_dir, resume=resume),
    )
