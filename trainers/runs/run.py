"""The run of a command that trains, from its request to its report.

`train`, `distill` and `qat` check and plan, and return a `PreparedTraining`. `run_training` writes the plan and the
ranks' inputs, launches `rank_main.py` on every rank, reads their result, and writes the report with the model.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import gcd
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from ...ds_configs.plan.measurement import FILE_NAME as MEASUREMENT_FILE
from ...ds_configs.plan.output import disk_errors, reserved, write_files
from ...ds_configs.plan.plan import Plan
from ...ds_configs.plan.rendering import NodePlace, launch_arguments, planned_training_arguments
from ...ds_configs.specs.errors import DoesNotFitError, RefusedInputError, ShardwrightError
from ...ds_configs.specs.job import GROUPED_TASKS
from ...plugins.huggingface_hub import model_directory
from ...plugins.launching.launch import Launch, free_port, launch_ranks, python_arguments
from ..checkpoints import RECORD, Selection, planned_facts
from ..data.chat import end_turns
from ..data.samples import Samples, SampleStatistics
from ..reports.report import markdown, perplexity
from ..reports.runs import REPORT_FILE as HTML_FILE
from ..reports.runs import TRAINING_FILE, training_report, write_html
from .inputs import CHECKPOINTS, check_resumption, last_checkpoint, optimizer_steps
from .settings import (
    EVALUATION_SAMPLES,
    JOB_FILE,
    METRICS_FILE,
    PLAN_DIRECTORY,
    REPORT_FILE,
    RESULT_FILE,
    TOKENIZER,
    TRAIN_SAMPLES,
    LaunchedJob,
    LaunchedSettings,
    RankJob,
    RunRequest,
)

logger = logging.getLogger(__name__)

RANK_MODULE = "shardwright.trainers.rank_main"
_NODE_CHECK = "shardwright.plugins.clusters"


def compile_operators(devices: Sequence[str], optimizer: str) -> None:
    """Compile the operators that DeepSpeed would otherwise compile on every CPU rank during the launch.

    Raises:
        ShardwrightError: a compilation fails, or a killed compilation left its lock.
    """
    from ...plugins.deepspeed.compiled_operators import needed_operators, prepare_operators
    from ...plugins.deepspeed.engine import has_libaio

    nvme = "nvme" in devices
    if nvme and not has_libaio():
        raise ShardwrightError(
            "NVMe offload compiles async_io, which requires the header of libaio: install libaio-dev (Debian) or "
            "libaio-devel, or plan with --offload cpu"
        )
    operators = needed_operators(offload_optimizer=devices[0] != "none", nvme=nvme, optimizer=optimizer)
    prepare_operators(operators)


def rank_words(job: RankJob, work: Path) -> list[str]:
    """Write the file of a job, and return the launcher's arguments for ranks that run it."""
    file = work / JOB_FILE
    file.write_text(job.model_dump_json(indent=1), encoding="utf-8")
    return ["-m", RANK_MODULE, str(file)]


def launch_job(
    job: RankJob,
    plan: Plan,
    plan_directory: Path,
    work: Path,
    *,
    launcher: Sequence[str] | None = None,
    place: NodePlace | None = None,
    check_nodes: bool = True,
    **waiting: Any,
) -> dict[str, Any]:
    """Run a job on the ranks of a plan, and return the result that the first rank wrote; empty without one.

    Raises:
        LaunchFailedError: a rank failed, or the machines cannot run the plan together.
        ShardwrightError: as `compile_operators`.
    """
    layout = plan.chosen.layout
    if layout.engine == "deepspeed" and plan.hardware.gpu == "CPU":
        compile_operators((layout.offload_optimizer, layout.offload_param), plan.job.optimizer)
    if place is not None and check_nodes:
        compare_nodes(plan, plan_directory, place)
    launcher = launcher or launch_arguments(plan, directory=str(plan_directory.absolute()), node=place)
    command = [*launcher, *rank_words(job, work)]
    # torchrun's `--standalone` selects a port itself.
    if place is None and command[0] == "accelerate":
        command[2:2] = ["--main_process_port", str(free_port())]
    launch_ranks(Launch(arguments=python_arguments(command), environment=_accelerators_shown(plan)), **waiting)
    file = work / RESULT_FILE
    result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return result


def compare_nodes(plan: Plan, plan_directory: Path, place: NodePlace) -> None:
    """Start one process per machine to compare the machines before ranks start.

    Raises:
        LaunchFailedError: they cannot run the plan together; gives the reason.
    """
    meeting = ["--node-rank", str(place.rank), "--master-addr", place.main_address]
    # Another port: the store of the previous run's main machine may still answer on the first one.
    meeting += ["--master-port", str(int(place.main_port) + 1)]
    command = ["torchrun", f"--nnodes={plan.hardware.nodes}", "--nproc-per-node=1", *meeting, "-m", _NODE_CHECK]
    command.append(str(plan_directory.absolute()))
    launch_ranks(Launch(arguments=python_arguments(command), environment=_accelerators_shown(plan)))


def _accelerators_shown(plan: Plan) -> dict[str, str]:
    """Return the variables that show a plan's accelerators, which launches hide by default, and those of the plan."""
    if plan.hardware.gpu == "CPU":
        return {}
    # An allocator that the user configured stays as it is.
    configured = os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
    planned = {} if configured else plan.environment
    every = ",".join(str(index) for index in range(plan.hardware.gpus_per_node))
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", every)
    return {**planned, "CUDA_VISIBLE_DEVICES": shown, "DS_ACCELERATOR": "cuda"}


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """Measurements of the ranks' steps; the content of `result.json`."""

    steps: int
    """Optimizer steps of the run."""
    step_seconds: float
    """Seconds of these steps; after a resume, of the steps since then, or of the logged ones if there are none."""
    tokens: int
    """Tokens trained on, without padding."""
    timed_tokens: int
    """Tokens of the steps that `step_seconds` counts."""
    peak_bytes: int | None
    """Largest allocation on any accelerator, evaluation included; `None` on CPU ranks."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all ranks per second of training steps."""
        return self.timed_tokens / self.step_seconds if self.step_seconds else 0.0


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class LaunchedOutcome(ABC):
    plan: Plan
    statistics: SampleStatistics
    """Samples that were trained and evaluated on."""
    metrics: Sequence[Mapping[str, float]]
    """The logged steps."""
    seconds: float
    """Wall-clock seconds from the launch to the report."""
    settings: LaunchedSettings
    result: StepResult

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as JSON values."""

    @abstractmethod
    def measures(self) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        """Return the results on the held-out samples: headings, and rows of a name and values."""

    def __repr__(self) -> str:
        headings, rows = self.measures()
        measures = ", ".join(f"{name} {value}" for name, value in zip(headings[1:], rows[0][1:], strict=True) if value)
        layout = f"{self.plan.chosen.layout.label} on {self.plan.hardware.name}"
        return f"<{type(self).__name__} of {self.statistics.source}, {layout}: {rows[0][0]}: {measures}>"

    def where_and_what(self) -> dict[str, Any]:
        return {
            "layout": self.plan.chosen.layout.label,
            "hardware": self.plan.hardware.name,
            "settings": self.settings.model_dump(),
            "dataset": asdict(self.statistics),
        }

    def speed(self) -> dict[str, Any]:
        return {
            "steps": self.result.steps,
            "tokens": self.result.tokens,
            "tokens_per_second": round(self.result.tokens_per_second, 1),
            "seconds": round(self.seconds, 1),
        }

    def speed_line(self) -> str:
        return (
            f"{self.result.steps} steps, {self.result.tokens:,} tokens, {self.result.tokens_per_second:,.0f} tokens/s, "
            f"{self.seconds:.0f} s total"
        )

    def files(self, kind: str, command: str = "") -> dict[str, str | bytes]:
        """Return report and figures by name; `command` is the command line."""
        data = self.to_dict()
        # The default learning rate depends on the method; the report shows the one that ran.
        data["settings"] = data["settings"] | {"learning_rate": self.settings.base_learning_rate()}
        headings, rows = self.measures()
        data |= {"kind": kind, "versions": dict(self.plan.versions), "command": command}
        data |= {"measures": {"headings": list(headings), "rows": [list(row) for row in rows]}}
        data |= {"result": asdict(self.result)}
        report = training_report(data, self.metrics, self.plan)
        return {
            REPORT_FILE: markdown(report),
            TRAINING_FILE: json.dumps(data, indent=2) + "\n",
        }


def losses(nats: float | None) -> tuple[str, str]:
    """Return a mean loss and its perplexity as text."""
    return ("not measured", "not measured") if nats is None else (f"{nats:.4f}", perplexity(nats))


def model_file_names(settings: LaunchedSettings) -> tuple[str, ...]:
    """Return the files that a run writes with its model, in addition to the plan's."""
    adapter = settings.method != "full"
    weights = "adapter_model.safetensors" if adapter else "model.safetensors"
    config = "adapter_config.json" if adapter else "config.json"
    return (REPORT_FILE, METRICS_FILE, config, weights, "tokenizer.json")


Outcome = TypeVar("Outcome", bound=LaunchedOutcome)
_COMPARED_SAMPLES = 256
"""Samples that machines compare to check that they read the same data."""


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
    processor: Any = None
    """Of a model that reads images, which is saved with its tokenizer; `None` for others."""

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
        """Keys of `TrainingArguments` that the plan and the settings set."""
        settings, plan, evaluated = self.settings, self.plan, len(self.samples.evaluation)
        ranks, group = plan.hardware.world_size, plan.job.generations
        # A micro-batch, or fewer samples if there are few; of grouped tasks complete groups, over all ranks.
        evaluation_batch = max(1, min(plan.chosen.layout.micro_batch_size, evaluated // ranks))
        if plan.job.task in GROUPED_TASKS:
            evaluation_batch = group // gcd(group, ranks)
        arguments = planned_training_arguments(plan) | {
            "output_dir": str(self.request.output_dir.absolute() / CHECKPOINTS),
            "learning_rate": settings.base_learning_rate(),
            "lr_scheduler_type": "cosine",
            "warmup_steps": 0.03,
            "num_train_epochs": settings.epochs,
            "per_device_eval_batch_size": evaluation_batch,
            "logging_steps": settings.logging_steps,
            "save_strategy": "no" if settings.save_steps is None else "steps",
            "seed": settings.seed,
            "report_to": list(settings.report_to) or "none",
            "disable_tqdm": True,
        }
        if any("images" in rows[0] for rows in (self.samples.train, self.samples.evaluation)):
            # The collator reads the images.
            arguments["remove_unused_columns"] = False
        own = {"max_steps": settings.max_steps, "save_steps": settings.save_steps}
        return arguments | {name: value for name, value in own.items() if value is not None} | dict(self.own_arguments)

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
    request, output_dir = prepared.request, prepared.request.output_dir
    if errors := disk_errors(output_dir, needed_bytes=prepared.least_bytes):
        raise DoesNotFitError("\n".join(map(str, errors)))
    with reserved(output_dir, force=request.force or request.resume):
        finished = _finished(prepared)
        if finished is not None and is_complete(prepared, finished):
            logger.info(f"{output_dir}: the run is complete, all of {finished.record.step} steps, model and report")
            content = json.loads((output_dir / TRAINING_FILE).read_bytes())
            if not (output_dir / HTML_FILE).is_file():
                write_html(output_dir, must=False)
            return prepared.outcome(content["result"], _outcome_facts(prepared, seconds=content["seconds"]))
        started = time.monotonic()
        try:
            result = _run_ranks(prepared)
            outcome = prepared.outcome(result, _outcome_facts(prepared, seconds=time.monotonic() - started))
            write_files(outcome.files(prepared.kind, request.command), output_dir, force=True)
            write_html(output_dir, must=False)
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
    write_samples(prepared.samples.train, work / TRAIN_SAMPLES)
    write_samples(prepared.samples.evaluation, work / EVALUATION_SAMPLES)
    if statistics.template_rows:
        job = job.model_copy(update={"turn_end": end_turns(prepared.tokenizer)})
    (prepared.processor or prepared.tokenizer).save_pretrained(str(work / TOKENIZER))
    return job


def write_samples(rows: Any, directory: Path) -> None:
    """Write a dataset to disk, which all ranks of a machine map into memory."""
    from datasets import Dataset, disable_progress_bars, enable_progress_bars, is_progress_bar_enabled

    shown = is_progress_bar_enabled()
    disable_progress_bars()
    (rows if isinstance(rows, Dataset) else Dataset.from_list(list(rows))).save_to_disk(str(directory))
    if shown:
        enable_progress_bars()


def _run_ranks(prepared: PreparedTraining[Any]) -> dict[str, Any]:
    """Write the ranks' inputs to a temporary directory, run the ranks, and return the result of the first one."""
    request, place = prepared.request, prepared.request.place
    with tempfile.TemporaryDirectory(prefix="shardwright-run-", ignore_cleanup_errors=True) as directory:
        work = Path(directory)
        job = rank_inputs(prepared, work)
        if place is not None:
            # Other machines must have the same inputs.
            contents = {"plan": (work / PLAN_DIRECTORY / "plan.json").read_bytes()}
            contents["settings"] = prepared.settings.model_dump_json().encode()
            contents |= {file.name: file.read_bytes() for file in sorted(work.iterdir()) if file.is_file()}
            samples = {"samples": prepared.samples.train, "held-out samples": prepared.samples.evaluation}
            for name, rows in samples.items():
                read = [rows[index] for index in range(0, len(rows), max(1, len(rows) // _COMPARED_SAMPLES))]
                contents[name] = json.dumps([len(rows), read], default=str).encode()
            digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
            job = job.model_copy(update={"digests": digests})
        plan_directory = work / PLAN_DIRECTORY
        return launch_job(job, prepared.plan, plan_directory, work, place=place, check_nodes=request.check_nodes)


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
    lines = (prepared.request.output_dir / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    return {
        "settings": prepared.settings,
        "plan": prepared.plan,
        "statistics": prepared.samples.statistics,
        "metrics": [json.loads(line) for line in lines],
        "seconds": seconds,
    }
