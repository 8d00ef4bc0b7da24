"""The run of a command that trains, from its request to its report.

`train`, `distill` and `qat` check and plan, and return a `PreparedTraining`. `run_training` writes the plan and the
ranks' inputs, launches `rank_main.py` on every rank, reads their result, and writes the report with the model.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from ...ds_configs.plan.measurement import FILE_NAME as MEASUREMENT_FILE
from ...ds_configs.plan.output import disk_errors, reserved, write_files
from ...ds_configs.plan.plan import Plan
from ...ds_configs.specs.errors import DoesNotFitError, RefusedInputError, ShardwrightError
from ...plugins.huggingface_hub import model_directory, pushed
from ..checkpoints import RECORD, Selection, planned_facts
from ..data.chat import end_turns
from ..data.samples import Samples
from ..reports.make import REPORT_FILE as HTML_FILE
from ..reports.make import TRAINING_FILE, write_html
from .inputs import CHECKPOINTS, check_resumption, common_arguments, last_checkpoint, optimizer_steps
from .launch import launch_job
from .report import LaunchedOutcome, read_metrics
from .settings import (
    EVALUATION_SAMPLES,
    PLAN_DIRECTORY,
    TOKENIZER,
    TRAIN_SAMPLES,
    LaunchedJob,
    LaunchedSettings,
    RunRequest,
)

Outcome = TypeVar("Outcome", bound=LaunchedOutcome)
_COMPARED_SAMPLES = 256
"""Samples that machines compare to check that they read the same data."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PreparedTraining(ABC, Generic[Outcome]):
    """A training that can be launched; nothing is written yet."""

    request: RunRequest
    settings: LaunchedSettings
    plan: Plan
    samples: Samples
    """To train and evaluate on."""
    tokenizer: Any
    """Saved with the model."""

    kind: ClassVar[str]
    """The command's name in `report.json`."""

    @property
    @abstractmethod
    def own_file_names(self) -> tuple[str, ...]:
        """Files that a run writes in addition to the plan, the model's weights and checkpoints."""

    @property
    @abstractmethod
    def models(self) -> Mapping[str, str]:
        """Models whose weights ranks load, by the name of the setting with their revision."""

    @abstractmethod
    def job(self, common: Mapping[str, Any], work: Path) -> LaunchedJob:
        """Return the job of the ranks, with the `common` fields; `work` is for further files that the ranks read."""

    @abstractmethod
    def outcome(self, result: Mapping[str, Any], common: Mapping[str, Any]) -> Outcome:
        """Return the outcome, from the measurements of the ranks and the `common` fields."""

    @property
    def own_arguments(self) -> Mapping[str, Any]:
        return {}

    @property
    def least_bytes(self) -> int:
        """Minimum bytes of the saved weights: two per parameter if all are saved."""
        return 2 * self.plan.model.parameter_count if self.settings.method == "full" else 0

    @property
    def training_arguments(self) -> dict[str, Any]:
        evaluated = len(self.samples.evaluation)
        common = common_arguments(self.settings, self.plan, self.request.output_dir, evaluated)
        return {**common, **self.own_arguments}

    @property
    def file_names(self) -> tuple[str, ...]:
        """Files that a run writes in addition to the model's weights and checkpoints."""
        plan = (f"{PLAN_DIRECTORY}/{name}" for name in self.plan.file_names)
        return (*plan, *self.own_file_names, MEASUREMENT_FILE, TRAINING_FILE, HTML_FILE)


def run_training(prepared: PreparedTraining[Outcome]) -> Outcome:
    """Launch a prepared training, wait for it, and write the report into the model directory.

    Raises:
        UsageError: another run writes to the directory, or its checkpoint cannot be resumed.
        DoesNotFitError: the model does not fit on the disk.
        ShardwrightError: a rank failed; names the rank and its error.
    """
    request, settings = prepared.request, prepared.settings
    output_dir = request.output_dir
    if errors := disk_errors(output_dir, needed_bytes=prepared.least_bytes):
        raise DoesNotFitError("\n".join(map(str, errors)))
    with ExitStack() as stack:
        stack.enter_context(reserved(output_dir, force=request.force or request.resume))
        # After the directory is reserved, and before a Hub repository is created.
        finished = _finished(prepared)
        stack.enter_context(pushed(output_dir, settings.push_to_hub, private=settings.private))
        if finished is not None and is_complete(prepared, finished):
            logger.info(f"{output_dir}: the run is complete, all of {finished.record.step} steps, model and report")
            content = json.loads((output_dir / TRAINING_FILE).read_bytes())
            if not (output_dir / HTML_FILE).is_file():
                _write_page(output_dir)
            return prepared.outcome(content["result"], _outcome_facts(prepared, seconds=content["seconds"]))
        started = time.monotonic()
        try:
            result = _run_ranks(prepared)
            outcome = prepared.outcome(result, _outcome_facts(prepared, seconds=time.monotonic() - started))
            write_files(outcome.files(prepared.kind, request.command), output_dir, force=True)
            _write_page(output_dir)
        # Ctrl-C, and SIGTERM to the command.
        except (KeyboardInterrupt, SystemExit):
            try:
                last = last_checkpoint(output_dir)
            except RefusedInputError as error:
                logger.info(f"stopped: {error}")
            else:
                resumable = f": {last.name} is complete; resume with the same command and --resume" if last else ""
                logger.info(f"stopped{resumable or ' before the first checkpoint'}")
            raise
        return outcome


def run_part(prepared: PreparedTraining[Any]) -> None:
    """Run the ranks of a machine other than the first, without a report.

    Raises:
        UsageError: the checkpoint cannot be resumed.
        ShardwrightError: a rank failed on any machine; names the rank and its error.
    """
    finished = _finished(prepared)
    if finished is None or not is_complete(prepared, finished):
        _run_ranks(prepared)


def _finished(prepared: PreparedTraining[Any]) -> Selection | None:
    """Return the last checkpoint if the run resumes and all steps are done; raises as `check_resumption`."""
    request = prepared.request
    if not request.resume:
        return None
    plan, samples = prepared.plan, prepared.samples.train
    facts = planned_facts(plan, prepared.training_arguments, samples)
    steps = optimizer_steps(prepared.settings, plan.chosen.layout, len(samples))
    try:
        return check_resumption(request.output_dir / CHECKPOINTS, facts, steps=steps)
    except RefusedInputError:
        # Ranks report why no checkpoint is complete.
        if not request.or_anew:
            raise
        return None


def rank_inputs(prepared: PreparedTraining[Any], work: Path) -> LaunchedJob:
    """Write the plan, samples and tokenizer that ranks read into a directory, and return their job."""
    from datasets import Dataset, disable_progress_bars, enable_progress_bars, is_progress_bar_enabled

    request, plan, statistics = prepared.request, prepared.plan, prepared.samples.statistics
    settings = prepared.settings
    # Resolve commits before anything is written, since the Hub may not have them; ranks load these commits.
    commits = {
        field: model_directory(model, revision=getattr(settings, field)).name
        for field, model in prepared.models.items()
        if not Path(model).expanduser().exists()
    }
    if request.place is None or request.place.is_first:
        plan.write(request.output_dir.absolute() / PLAN_DIRECTORY, force=True)
    fields = {
        "settings": settings.model_copy(update=commits),
        "training_arguments": prepared.training_arguments,
        "output_dir": str(request.output_dir.absolute()),
        "placements": {role: choice.placement for role, choice in plan.chosen.placements.items()},
        "world_size": plan.hardware.world_size,
        "train_samples": statistics.train_samples,
        "train_tokens": statistics.train_tokens,
        "resume": request.resume,
        "or_anew": request.or_anew,
        "command": request.full_command,
    }
    job = prepared.job(fields, work)
    # Machines may share the output directory, where only the first one writes.
    plan.write(work / PLAN_DIRECTORY)
    # Datasets on disk, which all ranks of a machine map into memory.
    shown = is_progress_bar_enabled()
    disable_progress_bars()
    for rows, name in ((prepared.samples.train, TRAIN_SAMPLES), (prepared.samples.evaluation, EVALUATION_SAMPLES)):
        (rows if isinstance(rows, Dataset) else Dataset.from_list(list(rows))).save_to_disk(str(work / name))
    if shown:
        enable_progress_bars()
    if statistics.template_rows:
        job = job.model_copy(update={"turn_end": end_turns(prepared.tokenizer)})
    prepared.tokenizer.save_pretrained(str(work / TOKENIZER))
    return job


def _run_ranks(prepared: PreparedTraining[Any]) -> dict[str, Any]:
    """Write the ranks' inputs to a temporary directory, run the ranks, and return the result of the first one."""
    request, place = prepared.request, prepared.request.place
    with tempfile.TemporaryDirectory(prefix="shardwright-run-", ignore_cleanup_errors=True) as directory:
        work = Path(directory)
        job = rank_inputs(prepared, work)
        if place is not None:
            job = job.model_copy(update={"digests": _digests(prepared, work)})
        plan_directory = work / PLAN_DIRECTORY
        return launch_job(job, prepared.plan, plan_directory, work, place=place, check_nodes=request.check_nodes)


def _digests(prepared: PreparedTraining[Any], work: Path) -> dict[str, str]:
    """Return digests of this machine's inputs, which other machines must match."""
    contents = {"plan": (work / PLAN_DIRECTORY / "plan.json").read_bytes()}
    contents["settings"] = prepared.settings.model_dump_json().encode()
    for file in sorted(path for path in work.iterdir() if path.is_file()):
        contents[file.name] = file.read_bytes()
    samples = {"samples": prepared.samples.train, "held-out samples": prepared.samples.evaluation}
    for name, rows in samples.items():
        read = [rows[index] for index in range(0, len(rows), max(1, len(rows) // _COMPARED_SAMPLES))]
        contents[name] = json.dumps([len(rows), read], default=str).encode()
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def is_complete(prepared: PreparedTraining[Any], finished: Selection) -> bool:
    """Return whether a run with this last checkpoint has also written its model and report.

    The report is written last: it is newer than the checkpoint unless it belongs to an earlier run.
    """
    output_dir = prepared.request.output_dir
    report = output_dir / TRAINING_FILE
    try:
        content = json.loads(report.read_bytes())
        is_newer = report.stat().st_mtime_ns >= (finished.path / RECORD).stat().st_mtime_ns
        is_own = (content["kind"], content["result"]["steps"]) == (prepared.kind, finished.record.step)
    except (OSError, ValueError, KeyError, TypeError):
        return False
    if not (is_newer and is_own):
        return False
    files = {output_dir / name for name in prepared.file_names if name != HTML_FILE}
    for file in tuple(files):
        # Large weights are shards, which an index lists.
        index = file.with_name(f"{file.name}.index.json")
        if not file.is_file() and index.is_file():
            files |= {file.parent / shard for shard in json.loads(index.read_bytes())["weight_map"].values()}
            files.remove(file)
    return all(file.is_file() for file in files)


def _outcome_facts(prepared: PreparedTraining[Any], *, seconds: float) -> dict[str, Any]:
    return {
        "settings": prepared.settings,
        "plan": prepared.plan,
        "statistics": prepared.samples.statistics,
        "metrics": read_metrics(prepared.request.output_dir),
        "seconds": seconds,
    }


def _write_page(output_dir: Path) -> None:
    try:
        write_html(output_dir)
    except ShardwrightError as error:
        # The model is saved, so the run must not fail because of its report.
        logger.info(f"{HTML_FILE} was not written: {error}")
