"""Launches the ranks of a planned training and follows them to their end."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...ds_configs.plan.launch import launch_arguments
from ...ds_configs.plan.plan import Plan
from ...ds_configs.plan.training_arguments import training_arguments as planned_arguments
from ...ds_configs.specs.errors import ShardwrightError
from ...plugins.launching.launch import LaunchFailedError, at_free_port, python_arguments, run
from ..data.samples import Samples
from .inputs import Notify, evaluation_batch_size
from .ranks import FAILURE, PROGRESS
from .settings import CHECKPOINTS, EVALUATION_SAMPLES, JOB_FILE, TRAIN_SAMPLES, LaunchedJob, LaunchedSettings

_LONGEST_RUN_SECONDS = 90 * 86400.0

OnStep = Callable[[int, int], None]
"""Receives the optimizer steps that are done and how many there are."""


def compile_operators(plan: Plan, notify: Notify) -> None:
    """Compile what DeepSpeed would compile on every rank at once, where CPU ranks need it."""
    strategy = plan.chosen.strategy
    if strategy.engine != "deepspeed" or plan.hardware.gpu != "CPU":
        return
    from ...plugins.deepspeed.compiled_operators import needed_operators, prepare_operators

    devices = strategy.offload_optimizer, strategy.offload_param
    operators = needed_operators(
        offload_optimizer=devices[0] != "none", nvme="nvme" in devices, optimizer=plan.job.optimizer
    )
    prepare_operators(operators, notify=notify)


def write_samples(samples: Samples, work: Path) -> None:
    """Leave samples that all ranks of a node map into memory."""
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    Dataset.from_list(samples.train).save_to_disk(str(work / TRAIN_SAMPLES))
    Dataset.from_list(samples.evaluation).save_to_disk(str(work / EVALUATION_SAMPLES))


def job_fields(plan: Plan, samples: Samples, output_dir: Path, *, resume: bool) -> dict[str, Any]:
    """Return the fields of `LaunchedJob` that follow from plan and data, but for the training arguments."""
    chosen = plan.chosen.teacher
    return {
        "output_dir": str(output_dir.absolute()),
        "placement": "replica" if chosen is None else chosen.placement,
        "world_size": plan.hardware.world_size,
        "train_samples": samples.statistics.train_samples,
        "train_tokens": samples.statistics.train_tokens,
        "resume": resume,
    }


def arguments_of(settings: LaunchedSettings, plan: Plan, samples: Samples, output_dir: Path) -> dict[str, Any]:
    """Return the keys of `TrainingArguments` that a plan and the settings ask for."""
    arguments = planned_arguments(plan) | {
        "output_dir": str(output_dir.absolute() / CHECKPOINTS),
        "learning_rate": settings.base_learning_rate(),
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.03,
        "num_train_epochs": settings.epochs,
        "per_device_eval_batch_size": evaluation_batch_size(plan, len(samples.evaluation)),
        "logging_steps": settings.logging_steps,
        "save_strategy": "no" if settings.save_steps is None else "steps",
        "seed": settings.seed,
        "report_to": "none",
        "disable_tqdm": True,
    }
    if settings.max_steps is not None:
        arguments["max_steps"] = settings.max_steps
    if settings.save_steps is not None:
        arguments["save_steps"] = settings.save_steps
    return arguments


def launch(module: str, job: LaunchedJob, plan: Plan, plan_directory: Path, work: Path, on_step: OnStep) -> None:
    """Run a plan's own launcher with a worker in place of the training module.

    Args:
        module: The worker, which every rank runs.
        job: What it is told.
        plan: What is launched.
        plan_directory: Where its files lie.
        work: Where the job goes, and where ranks leave failures and results.
        on_step: Hears of every optimizer step.

    Raises:
        ShardwrightError: a rank failed; says which and why.
    """
    (work / JOB_FILE).write_text(job.model_dump_json(indent=1), encoding="utf-8")
    command = launch_arguments(plan, directory=str(plan_directory))
    command = command[: command.index("-m")]
    command, port = at_free_port([*command, "-m", module, "--settings", str(work / JOB_FILE)])

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
            port=port,
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
        return ShardwrightError(f"training: {dead}{hint}; the other ranks were ended")
    if not failures:
        return ShardwrightError(f"training: {error}")
    first = min(failures, key=lambda failure: float(failure["time"]))
    shown = "" if first["known"] else f"\n{first['traceback'].rstrip()}"
    found = ShardwrightError(f"rank {first['rank']}: {first['message']}{shown}")
    found.exit_code = first["exit_code"]
    return found
