"""`shardwright train`, `distill` and `qat`: prepare, launch and report a training run; dry runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import Field
from rich.text import Text

from ...ds_configs.specs.errors import UsageError, collecting
from ...ds_configs.specs.job import AXIS_FIELDS
from ...trainers.distillation.settings import DistillSettings
from ...trainers.qat.settings import QATSettings
from ...trainers.training.settings import TrainSettings
from ..options import Machine, Output
from ..progress import note, progress_on_stderr
from ..settings import FILLED, Options, command_line

if TYPE_CHECKING:
    from ...trainers.distillation.command import DistillationOutcome
    from ...trainers.qat.command import PreparedQAT, QATOutcome
    from ...trainers.runs.run import LaunchedOutcome, PreparedTraining
    from ...trainers.runs.settings import RunRequest
    from ...trainers.training.task import TrainOutcome

Outcome = TypeVar("Outcome", bound="LaunchedOutcome")


class TrainingRun(Output, Machine):
    """Options of a command that launches a training run."""

    output_dir: Path = Field(description="Directory for the model, its report and plan")
    resume: bool = Field(False, description="Resume from the last checkpoint in the output directory")
    resume_or_anew: bool = Field(False, description="As --resume, but start over if no checkpoint is complete")
    force: bool = Field(False, description="Write into a directory that is not empty")
    dry_run: bool = Field(False, description="Print data, plan and files; launch and write nothing")


def train_command(model: str, *, settings: Options[TrainSettings] = FILLED, options: Options[TrainingRun]) -> int:
    """Train a model on your data: plan, launch, evaluate before and after, save with a report.

    Parameters
    ----------
    model
        Hub id or directory; a config.json for random weights.
    """
    from ...trainers.training.task import prepare_train

    return _launched(partial(prepare_train, settings, model), options, show_training)


def show_training(outcome: TrainOutcome, output_dir: Path) -> None:
    from ...trainers.quantization import suggested_command
    from ..show import show_next

    made = f"on {outcome.statistics.source}"
    _show_outcome(outcome, output_dir, name=outcome.model, made=made, noun="Model")
    if outcome.settings.method == "full":
        show_next(*suggested_command(output_dir))
    else:
        show_next("shardwright", "merge", output_dir, "--output-dir", f"{output_dir}-merged")


def distill_command(
    teacher: str,
    student: str,
    *,
    settings: Options[DistillSettings] = FILLED,
    options: Options[TrainingRun],
) -> int:
    """Distill a teacher into a student: plan, train, evaluate before and after, save with a report.

    Parameters
    ----------
    teacher
        Hub id or directory; weights are read from safetensors.
    student
        Hub id or directory; a config.json for random weights.
    """
    from ...trainers.distillation.command import prepare_distillation

    return _launched(partial(prepare_distillation, settings, teacher, student), options, show_distillation)


def show_distillation(outcome: DistillationOutcome, output_dir: Path) -> None:
    from ...trainers.quantization import suggested_command
    from ..show import show_next

    made = f"distilled from {outcome.teacher}"
    _show_outcome(outcome, output_dir, name=outcome.student, made=made, noun="Student")
    if outcome.settings.method == "full":
        show_next(*suggested_command(output_dir))


def qat_command(model: str, *, settings: Options[QATSettings] = FILLED, options: Options[TrainingRun]) -> int:
    """Train a model with the quantized values of its checkpoint, and export exactly these values.

    Parameters
    ----------
    model
        Hub id or directory; weights are read from safetensors.
    """
    from ...trainers.qat.command import prepare_qat

    def describe(prepared: PreparedQAT, *, as_json: bool) -> dict[str, object]:
        scheme = prepared.config.rounded_scheme
        if as_json:
            layers = [layer.name for layer in prepared.layers]
            return {"scheme": asdict(scheme) | {"format": scheme.format}, "layers": layers}
        return {"scheme": f"{scheme.name}, {scheme.format}", "layers": f"{len(prepared.layers)} quantized"}

    return _launched(partial(prepare_qat, settings, model), options, show_qat, describe)


def show_qat(outcome: QATOutcome, output_dir: Path) -> None:
    from ...trainers.reports.runs import checkpoint_facts
    from ..show import show_next

    distilled = "" if outcome.settings.teacher is None else ", distilled from itself in full precision"
    trained, *before = outcome.measures()[1]
    rows: list[Sequence[str | Text]] = [*reversed(before), [Text(value, style="bold green") for value in trained]]
    _show_outcome(
        outcome,
        output_dir,
        name=outcome.model,
        made=f"as {outcome.scheme.name}{distilled}",
        noun="Checkpoint",
        rows=rows,
        facts=checkpoint_facts(outcome.to_dict()),
    )
    show_next("shardwright", "evaluate", output_dir, "--baseline", outcome.model)


def _launched(
    prepare: Callable[[RunRequest], PreparedTraining[Outcome]],
    options: TrainingRun,
    show: Callable[[Outcome, Path], None],
    describe: Callable[..., dict[str, object]] = lambda prepared, as_json: {},
) -> int:
    """Prepare, launch and report a training run, and return the exit code.

    `describe` returns what a dry run prints in addition to settings, plan and data.
    """
    from ...trainers.reports.runs import REPORT_FILE as HTML_FILE
    from ...trainers.runs.run import run_part, run_training
    from ...trainers.runs.settings import RunRequest

    output_dir, as_json, errors = options.output_dir, options.as_json, options.errors()
    request = RunRequest(
        output_dir=output_dir,
        resume=options.resume or options.resume_or_anew,
        or_anew=options.resume_or_anew,
        force=options.force,
        dry_run=options.dry_run,
        place=None if options.dry_run or errors else options.place(),
        check_nodes=options.check_nodes,
        command=command_line(),
        full_command=command_line(full=True),
    )
    prepared = None
    # Some libraries log to stdout, which is for results only.
    with collecting(errors), redirect_stdout(sys.stderr):
        prepared = prepare(request)
    if errors:
        raise UsageError(errors)
    assert prepared is not None, "a failed preparation left an error"
    if options.dry_run:
        _show_dry_run(prepared, output_dir, describe(prepared, as_json=as_json), as_json=as_json)
        return 0
    if request.place is not None and not request.place.is_first:
        with redirect_stdout(sys.stderr):
            run_part(prepared)
        note(f"machine {request.place.rank} is done; the results are on {request.place.main_address}")
        return 0
    with redirect_stdout(sys.stderr), progress_on_stderr("starting the ranks", plan=prepared.plan):
        outcome = run_training(prepared)
    if as_json:
        print(json.dumps(outcome.to_dict() | {"output_dir": str(output_dir)}))
    else:
        show(outcome, output_dir)
        note(f"HTML report: {output_dir / HTML_FILE}")
    return 0


def _show_outcome(
    outcome: LaunchedOutcome,
    output_dir: Path,
    *,
    name: str,
    made: str,
    noun: str,
    rows: Sequence[Sequence[str | Text]] = (),
    facts: Sequence[tuple[str, str]] = (),
) -> None:
    """Print the results on the held-out samples, and the files.

    By default, `rows` are the measures of the outcome, with the second value highlighted.
    """
    from ...trainers.runs.settings import REPORT_FILE
    from ..show import console, print_rows

    out = console()
    label, hardware = outcome.plan.chosen.layout.label, outcome.plan.hardware.name
    out.print(Text.assemble((name, "bold"), f"  {made}, {label} on {hardware}"))
    out.print()
    headings, measured = outcome.measures()
    rows = rows or [(row[0], row[1], Text(row[2], style="bold green"), *row[3:]) for row in measured]
    on = f"{outcome.statistics.evaluation_samples} held-out samples"
    print_rows(out, (on, *headings[1:]), rows, figures=headings[1:])
    out.print()
    for fact, value in facts:
        out.print(f"  {fact}: {value}", markup=False)
    out.print(outcome.speed_line())
    out.print(f"{noun} in {output_dir}; see {output_dir / REPORT_FILE}", markup=False)


def _show_dry_run(prepared: PreparedTraining[Any], output_dir: Path, more: dict[str, object], *, as_json: bool) -> None:
    """Print settings, plan, data and files of a run that was not launched, as text or one JSON object."""
    from ...ds_configs.plan.plan import plan_to_dict
    from ..show import console, show_plan, show_settings

    settings, plan, samples = prepared.settings, prepared.plan, prepared.samples
    statistics, values = samples.statistics, settings.model_dump()
    files = [str(output_dir / name) for name in prepared.file_names]
    if as_json:
        layout = plan.chosen.layout
        planned = plan.job.options() | {name: getattr(layout, axis) for name, axis in AXIS_FIELDS.items()}
        planned |= {name: getattr(layout, name) for name in ("micro_batch_size", "global_batch_size")}
        values |= {name: planned[name] for name in planned.keys() & values.keys() if values[name] is None}
        shown = {"schema_version": 1, "settings": values, "dataset": asdict(statistics), "plan": plan_to_dict(plan)}
        print(json.dumps(shown | more | {"files": files}))
        return
    show_settings(values, settings.origins())
    show_plan(plan, None, output_dir_hint=False, verbose=True)
    out = console()
    out.print(
        f"{statistics.train_samples:,} samples of {statistics.source} with {statistics.train_labels:,} labelled tokens "
        f"to train on, {len(samples.evaluation):,} to evaluate on",
        markup=False,
    )
    for name, value in more.items():
        out.print(f"{name.replace('_', ' ')}: {value}", markup=False)
    out.print("A run would write " + ", ".join(files), markup=False)
