"""Launches a prepared distillation, follows it, and reports what became of the student."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...ds_configs.errors import ShardwrightError
from ...ds_configs.plan import Plan
from ...ds_configs.render.launch import launch_arguments
from ...ds_configs.render.training_arguments import training_arguments as planned_arguments
from ...ds_configs.render.write import write_files
from ...plugins.launching import LaunchFailedError, free_port, python_arguments, run
from .run_files import (
    CHECKPOINTS,
    EVALUATION_SAMPLES,
    JOB_FILE,
    PLAN_DIRECTORY,
    RESULT_FILE,
    TEACHER_TOKENIZER,
    TOKENIZER,
    TRAIN_SAMPLES,
    WorkerJob,
)
from .run_inputs import Notify, Prepared, evaluation_batch_size
from .run_report import Outcome, RunResult, read_metrics, report_files
from .worker import FAILURE, PROGRESS

_WORKER = f"{__package__}.worker"
_LONGEST_RUN_SECONDS = 90 * 86400.0

OnStep = Callable[[int, int], None]
"""Receives the optimizer steps that are done and how many there are."""


def distill(prepared: Prepared, output_dir: Path, *, resume: bool, notify: Notify, on_step: OnStep) -> Outcome:
    """Launch a prepared distillation, wait for it, and write the report beside the student.

    Raises:
        ShardwrightError: a rank failed; says which and why.
    """
    started = time.monotonic()
    plan_directory = output_dir.absolute() / PLAN_DIRECTORY
    prepared.plan.write(plan_directory, force=True)
    _compile_operators(prepared.plan, notify)
    with tempfile.TemporaryDirectory(prefix="shardwright-distill-", ignore_cleanup_errors=True) as directory:
        work = Path(directory)
        _write_work(prepared, work, output_dir, resume=resume)
        _launch(prepared.plan, plan_directory, work, on_step)
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


def _compile_operators(plan: Plan, notify: Notify) -> None:
    strategy = plan.chosen.strategy
    if strategy.engine != "deepspeed" or plan.hardware.gpu != "CPU":
        return
    from ...plugins.compiled_operators import needed_operators, prepare_operators

    devices = strategy.offload_optimizer, strategy.offload_param
    operators = needed_operators(
        offload_optimizer=devices[0] != "none", nvme="nvme" in devices, optimizer=plan.job.optimizer
    )
    prepare_operators(operators, notify=notify)


def _write_work(prepared: Prepared, work: Path, output_dir: Path, *, resume: bool) -> None:
    """Leave what the ranks read: settings, tokenizers, and samples that all ranks of a node map into memory."""
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    Dataset.from_list(prepared.samples.train).save_to_disk(str(work / TRAIN_SAMPLES))
    Dataset.from_list(prepared.samples.evaluation).save_to_disk(str(work / EVALUATION_SAMPLES))
    prepared.tokenizer.save_pretrained(str(work / TOKENIZER))
    prepared.teacher_tokenizer.save_pretrained(str(work / TEACHER_TOKENIZER))
    plan = prepared.plan
    chosen = plan.chosen.teacher
    cache = prepared.settings.teacher_cache
    settings = {"teacher_cache": str(Path(cache).absolute())} if cache else {}
    job = WorkerJob(
        settings=prepared.settings.model_copy(update=settings),
        teacher=prepared.teacher,
        student=prepared.student,
        output_dir=str(output_dir.absolute()),
        training_arguments=_arguments(prepared, output_dir),
        placement="replica" if chosen is None else chosen.placement,
        vocab_size=prepared.vocab_size,
        world_size=plan.hardware.world_size,
        train_samples=prepared.samples.statistics.train_samples,
        train_tokens=prepared.samples.statistics.train_tokens,
        resume=resume,
    )
    (work / JOB_FILE).write_text(job.model_dump_json(indent=1), encoding="utf-8")


def _arguments(prepared: Prepared, output_dir: Path) -> dict[str, Any]:
    settings = prepared.settings
    arguments = planned_arguments(prepared.plan) | {
        "output_dir": str(output_dir.absolute() / CHECKPOINTS),
        "learning_rate": settings.base_learning_rate(),
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.03,
        "num_train_epochs": settings.epochs,
        "per_device_eval_batch_size": evaluation_batch_size(prepared.plan, len(prepared.samples.evaluation)),
        "logging_steps": settings.logging_steps,
        "save_strategy": "no" if settings.save_steps is None else "steps",
        "eval_on_start": True,
        "seed": settings.seed,
        "report_to": "none",
        "disable_tqdm": True,
    }
    if settings.max_steps is not None:
        arguments["max_steps"] = settings.max_steps
    if settings.save_steps is not None:
        arguments["save_steps"] = settings.save_steps
    return arguments


def _launch(plan: Plan, plan_directory: Path, work: Path, on_step: OnStep) -> None:
    """Run the plan's own launcher with the worker in place of the training module."""
    command = launch_arguments(plan, directory=str(plan_directory))
    command = command[: command.index("-m")]
    if command[0] == "accelerate":
        command += ["--main_process_port", str(free_port())]
    command += ["-m", _WORKER, "--settings", str(work / JOB_FILE)]

    def on_line(line: str) -> None:
        if line.startswith(PROGRESS):
            # Ranks share one output: another may have written into the line.
            with contextlib.suppress(ValueError, TypeError, KeyError):
                told = json.loads(line.removeprefix(PROGRESS))
                on_step(int(told["step"]), int(told["steps"]))

    try:
        run(
            python_arguments(command),
            timeout_seconds=_LONGEST_RUN_SECONDS,
            environment=_accelerators(plan),
            on_line=on_line,
        )
    except LaunchFailedError as error:
        raise failure_cause(error, work) from None


def _accelerators(plan: Plan) -> dict[str, str]:
    """Launches hide accelerators unless they are named."""
    if plan.hardware.gpu == "CPU":
        return {}
    every = ",".join(str(index) for index in range(plan.hardware.world_size))
    return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", every), "DS_ACCELERATOR": "cuda"}


def failure_cause(error: LaunchFailedError, work: Path) -> ShardwrightError:
    """Say what ended the launch: the rank that a signal killed, else the rank that failed first."""
    failures = [json.loads(path.read_text(encoding="utf-8")) for path in work.glob(f"{FAILURE}*.json")]
    if error.dead_ranks:
        dead = ", ".join(f"rank {rank} was killed by {name}" for rank, name in error.dead_ranks)
        hint = " (the kernel does so when memory runs out)" if "SIGKILL" in dead else ""
        return ShardwrightError(f"distillation: {dead}{hint}; the other ranks were ended")
    if not failures:
        return ShardwrightError(f"distillation: {error}")
    first = min(failures, key=lambda failure: float(failure["time"]))
    shown = "" if first["known"] else f"\n{first['traceback'].rstrip()}"
    found = ShardwrightError(f"rank {first['rank']}: {first['message']}{shown}")
    found.exit_code = first["exit_code"]
    return found
