"""The run of a command that trains: `run_training` does what all of them do, `PreparedTraining` asks for the rest.

The order is: write the plan and what the ranks read, launch a worker on every rank, read what it measured, and write
the report beside the model. Everything that can be wrong was found before, when the command prepared the training.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from ...ds_configs.plan.launch import NodePlace
from ...ds_configs.plan.output import disk_faults, reserved
from ...ds_configs.plan.plan import Plan
from ...ds_configs.plan.write import write_files
from ...ds_configs.specs.errors import DoesNotFitError, RefusedInputError, ShardwrightError
from ...plugins.huggingface_hub.model_directory import model_directory
from ...plugins.huggingface_hub.push import pushed
from ...plugins.launching.notes import Notify, OnProgress
from ..checkpoints.run_facts import planned_facts
from ..data.samples import Samples
from ..reports.make import REPORT_FILE as HTML_FILE
from ..reports.make import write_html
from ..reports.read import TRAINING_FILE
from .checkpoints import CHECKPOINTS, last_checkpoint, refuse_to_resume
from .inputs import common_arguments, optimizer_steps
from .launch import checking_launch, compile_operators, planned_launch, run_launches, write_job
from .progress import Figures, OnFigures, OnStep
from .report import LaunchedOutcome, read_metrics
from .settings import (
    EVALUATION_SAMPLES,
    PLAN_DIRECTORY,
    RESULT_FILE,
    TOKENIZER,
    TRAIN_SAMPLES,
    LaunchedJob,
    LaunchedSettings,
)

Outcome = TypeVar("Outcome", bound=LaunchedOutcome)
_COMPARED_SAMPLES = 256
"""Samples by which machines tell whether they read the same data."""


@dataclass(frozen=True, kw_only=True)
class PreparedTraining(ABC, Generic[Outcome]):
    """A training that can be launched; nothing was written for it."""

    settings: LaunchedSettings
    """What was asked for."""
    plan: Plan
    """Where everything goes."""
    samples: Samples
    """What is trained and evaluated on."""
    tokenizer: Any
    """Splits the text; saved beside the model."""
    place: NodePlace | None = None
    """This machine's among several; `None` for the only one."""

    kind: ClassVar[str]
    """The command's name, as `report.json` states it."""
    worker: ClassVar[str]
    """Module that every rank runs; it ends with `run_rank`."""

    @property
    @abstractmethod
    def own_file_names(self) -> tuple[str, ...]:
        """Files that a run writes, beside the plan's, the model's weights and checkpoints."""

    @abstractmethod
    def job(self, common: Mapping[str, Any], work: Path, *, resume: bool, notify: Notify) -> LaunchedJob:
        """Return what the ranks are told.

        Args:
            common: The fields of `LaunchedJob`.
            work: A directory for files that the ranks read, beside samples and tokenizer.
            resume: Whether the training goes on from its last checkpoint.
            notify: Receives remarks.
        """

    @abstractmethod
    def report(self, result: Mapping[str, Any], common: Mapping[str, Any]) -> tuple[Outcome, Mapping[str, str | bytes]]:
        """Return the outcome and the files that report it.

        Args:
            result: What the ranks measured.
            common: The fields of `LaunchedOutcome`.
        """

    @property
    @abstractmethod
    def models(self) -> Mapping[str, str]:
        """Models that ranks load weights of, by the setting that holds the revision of each."""

    @property
    def own_arguments(self) -> Mapping[str, Any]:
        """Keys of `TrainingArguments` beside those that the plan and the settings of every training ask for."""
        return {}

    @property
    def least_bytes(self) -> int:
        """Bytes that the trained weights will take at least: two for each where all are saved."""
        return 2 * self.plan.model.parameter_count if self.settings.method == "full" else 0

    @property
    def file_names(self) -> tuple[str, ...]:
        """Files that a run writes, beside the model's weights and checkpoints."""
        plan = (f"{PLAN_DIRECTORY}/{name}" for name in self.plan.file_names)
        return (*plan, *self.own_file_names, TRAINING_FILE, HTML_FILE)


def run_training(
    prepared: PreparedTraining[Outcome],
    output_dir: Path,
    *,
    resume: bool = False,
    force: bool = False,
    check_nodes: bool = True,
    notify: Notify = lambda _: None,
    on_progress: OnProgress = lambda _what, _done, _total: None,
    on_figures: OnFigures = lambda _: None,
    command: str = "",
) -> Outcome:
    """Launch a prepared training, wait for it, and write the report beside the model.

    Args:
        prepared: What the command found.
        output_dir: Where model, plan and report go.
        resume: Go on from the last checkpoint.
        force: Write into a directory that holds other files.
        check_nodes: Whether several machines are compared first.
        notify: Receives remarks.
        on_progress: Hears of every optimizer step.
        on_figures: Hears the loss, the speed, the memory and the rank that lags before each of them.
        command: Command line that asked for it, for the report.

    Raises:
        UsageError: another run writes to the directory, or what it holds cannot be gone on with.
        DoesNotFitError: the model does not fit on its disk.
        ShardwrightError: a rank failed; says which and why.
    """
    if faults := disk_faults(output_dir, needed_bytes=prepared.least_bytes):
        raise DoesNotFitError("\n".join(map(str, faults)))
    settings = prepared.settings
    with ExitStack() as stack:
        stack.enter_context(reserved(output_dir, force=force or resume))
        # Once nobody else writes there, and before a repository is made for it.
        if resume:
            _refuse_to_resume(prepared, output_dir)
        stack.enter_context(pushed(output_dir, settings.push_to_hub, private=settings.private, notify=notify))
        how: dict[str, Any] = {"notify": notify, "on_progress": on_progress, "on_figures": on_figures}
        how |= {"resume": resume, "check_nodes": check_nodes, "command": command}
        try:
            return _run_training(prepared, output_dir, **how)
        # Ctrl-C, and SIGTERM to the command.
        except (KeyboardInterrupt, SystemExit):
            notify(_what_is_left(output_dir))
            raise


def _refuse_to_resume(prepared: PreparedTraining[Any], output_dir: Path) -> None:
    plan, samples = prepared.plan, prepared.samples.train
    # Ranks draw the order of samples that are divided among machines.
    compared = None if prepared.samples.statistics.machines > 1 else samples
    facts = planned_facts(plan, _arguments(prepared, output_dir), compared)
    steps = optimizer_steps(prepared.settings, plan.chosen.strategy, len(samples))
    refuse_to_resume(output_dir / CHECKPOINTS, facts, steps=steps)


def _what_is_left(output_dir: Path) -> str:
    """Return what a training that was stopped can go on from."""
    try:
        last = last_checkpoint(output_dir)
    except RefusedInputError as error:
        return f"stopped: {error}"
    if last is None:
        return "stopped before there was a checkpoint"
    return f"stopped: {last.name} is whole, and the same command with --resume goes on from it"


def run_part(
    prepared: PreparedTraining[Any],
    output_dir: Path,
    *,
    resume: bool = False,
    check_nodes: bool = True,
    notify: Notify = lambda _: None,
) -> None:
    """Run the part of a machine that is not the first: its ranks, without a report.

    Raises:
        UsageError: the directory holds what cannot be gone on with.
        ShardwrightError: a rank failed, here or elsewhere; says which and why.
    """
    if resume:
        _refuse_to_resume(prepared, output_dir)
    with _workplace() as work:
        settings = _with_weights_here(prepared)
        _launch(prepared, settings, output_dir, work, resume=resume, check_nodes=check_nodes, notify=notify)


def _workplace() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="shardwright-run-", ignore_cleanup_errors=True)


def _run_training(
    prepared: PreparedTraining[Outcome],
    output_dir: Path,
    *,
    resume: bool,
    check_nodes: bool,
    notify: Notify,
    on_progress: OnProgress,
    on_figures: OnFigures,
    command: str,
) -> Outcome:
    started = time.monotonic()
    plan, samples = prepared.plan, prepared.samples

    def on_step(step: int, steps: int, figures: Figures) -> None:
        on_figures(figures)
        on_progress("step", step, steps)

    with _workplace() as work:
        # Before anything is written: the Hub may not have them.
        settings = _with_weights_here(prepared)
        plan.write(output_dir.absolute() / PLAN_DIRECTORY, force=True)
        how: dict[str, Any] = {"resume": resume, "check_nodes": check_nodes, "notify": notify}
        _launch(prepared, settings, output_dir, work, on_step=on_step, **how)
        result = json.loads((Path(work) / RESULT_FILE).read_text(encoding="utf-8"))
    facts = {
        "settings": prepared.settings,
        "plan": plan,
        "statistics": samples.statistics,
        "metrics": read_metrics(output_dir),
        "seconds": time.monotonic() - started,
    }
    outcome, files = prepared.report(result, facts)
    files = {**files, TRAINING_FILE: outcome.figures(prepared.kind, result, command)}
    write_files(files, output_dir, force=True)
    try:
        write_html(output_dir)
    except ShardwrightError as error:
        # The model is trained and saved: that its report cannot be drawn is no reason to fail.
        notify(f"{HTML_FILE} was not written: {error}")
    return outcome


def _launch(
    prepared: PreparedTraining[Any],
    settings: LaunchedSettings,
    output_dir: Path,
    directory: str,
    *,
    resume: bool,
    check_nodes: bool,
    notify: Notify,
    on_step: OnStep = lambda _step, _steps, _figures: None,
) -> None:
    """Leave what ranks read in a directory of this machine, and run its ranks to their end."""
    plan, place, work = prepared.plan, prepared.place, Path(directory)
    fields = _job_fields(prepared, output_dir, resume=resume) | {"settings": settings}
    job = prepared.job(fields, work, resume=resume, notify=notify)
    # The output directory may be seen by all machines, and the first alone writes there.
    plan_directory = work / PLAN_DIRECTORY
    plan.write(plan_directory)
    strategy = plan.chosen.strategy
    if strategy.engine == "deepspeed" and plan.hardware.gpu == "CPU":
        compile_operators((strategy.offload_optimizer, strategy.offload_param), plan.job.optimizer, notify)
    _write_samples(prepared.samples, work)
    prepared.tokenizer.save_pretrained(str(work / TOKENIZER))
    if place is not None:
        if check_nodes:
            run_launches([checking_launch(plan, plan_directory, place, output_dir)], on_step, notify=notify)
        job = job.model_copy(update={"digests": _digests(prepared, work)})
    launched = planned_launch([prepared.worker, write_job(job, work)], plan, plan_directory, place=place)
    run_launches([launched], on_step, notify=notify)


def _digests(prepared: PreparedTraining[Any], work: Path) -> dict[str, str]:
    """Return digests of what this machine made for itself: its plan, its settings, files of its work and its samples.

    Of the samples as many are read as tell another dataset or another order. Those that are divided among machines
    differ on each.
    """
    found = {"plan": (work / PLAN_DIRECTORY / "plan.json").read_bytes()}
    found["settings"] = prepared.settings.model_dump_json().encode()
    for file in sorted(path for path in work.iterdir() if path.is_file()):
        found[file.name] = file.read_bytes()
    samples = {"samples": prepared.samples.train, "held-out samples": prepared.samples.evaluation}
    if prepared.samples.statistics.machines > 1:
        del samples["samples"]
    for name, rows in samples.items():
        read = [rows[index] for index in range(0, len(rows), max(1, len(rows) // _COMPARED_SAMPLES))]
        found[name] = json.dumps([len(rows), read], default=str).encode()
    return {name: hashlib.sha256(content).hexdigest() for name, content in found.items()}


def _write_samples(samples: Samples, work: Path) -> None:
    """Leave samples that all ranks of a node map into memory."""
    from datasets import Dataset, disable_progress_bars, enable_progress_bars, is_progress_bar_enabled

    shown = is_progress_bar_enabled()
    disable_progress_bars()
    for rows, name in ((samples.train, TRAIN_SAMPLES), (samples.evaluation, EVALUATION_SAMPLES)):
        (rows if isinstance(rows, Dataset) else Dataset.from_list(list(rows))).save_to_disk(str(work / name))
    if shown:
        enable_progress_bars()


def _with_weights_here(prepared: PreparedTraining[Any]) -> LaunchedSettings:
    """Fetch what the Hub has of the models, once for all ranks, and return the settings with its commits."""
    settings, commits = prepared.settings, {}
    for field, model in prepared.models.items():
        if not Path(model).expanduser().exists():
            commits[field] = model_directory(model, revision=getattr(settings, field)).name
    return settings.model_copy(update=commits)


def _job_fields(prepared: PreparedTraining[Any], output_dir: Path, *, resume: bool) -> dict[str, Any]:
    plan, statistics = prepared.plan, prepared.samples.statistics
    teacher = plan.chosen.teacher
    return {
        "training_arguments": _arguments(prepared, output_dir),
        "output_dir": str(output_dir.absolute()),
        "placement": "replica" if teacher is None else teacher.placement,
        "world_size": plan.hardware.world_size,
        "train_samples": statistics.train_samples,
        "train_tokens": statistics.train_tokens,
        "resume": resume,
    }


def _arguments(prepared: PreparedTraining[Any], output_dir: Path) -> dict[str, Any]:
    """Return the keys of `TrainingArguments` of a run."""
    held_out = len(prepared.samples.evaluation)
    return {**common_arguments(prepared.settings, prepared.plan, output_dir, held_out), **prepared.own_arguments}
