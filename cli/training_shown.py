"""Frame of every command that launches a training: a dry run, progress, and the outcome."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..ds_configs.specs.errors import Fault, UsageError
from .command_line import command_line
from .machines import TrainingMachineOptions, run_on_hosts, slurm_script_of_command, submit_to_slurm, tell_place
from .options import TrainingOptions
from .progress import Bar, LinesAtTimes, note, progress_on_stderr

if TYPE_CHECKING:
    from rich.console import Console

    from ..ds_configs.plan.plan import Plan
    from ..ds_configs.specs.hardware import HardwareSpec
    from ..trainers.data.samples import Samples
    from ..trainers.runs.report import LaunchedOutcome
    from ..trainers.runs.run import PreparedTraining
    from ..trainers.runs.settings import LaunchedSettings

Outcome = TypeVar("Outcome", bound="LaunchedOutcome")


def launched_command(
    prepare: Callable[..., PreparedTraining[Outcome]],
    options: TrainingOptions,
    machines: TrainingMachineOptions,
    settings: LaunchedSettings,
    show: Callable[[Outcome, Path], None],
    describe: Callable[..., dict[str, Any]] = lambda prepared, as_json: {},
) -> int:
    """Run a training from its preparation to what is printed, and return the exit code.

    Args:
        prepare: Checks everything; receives `how` the run begins, with this machine's `place` among several.
        options: How the run begins and what it prints.
        machines: Which ones run it.
        settings: What is asked for.
        show: Prints an outcome for people.
        describe: Returns what a dry run shows beside settings, plan and data; receives the prepared training and
            `as_json`.
    """
    from ..trainers.reports.make import REPORT_FILE as HTML_FILE
    from ..trainers.runs.run import run_part, run_training

    output_dir, as_json = options.output_dir, options.as_json
    if faults := machines.faults():
        raise UsageError(faults)
    if machines.on == "ssh" and not options.dry_run:
        return run_on_hosts(machines, nodes=_planned_hardware(settings).nodes)
    script = ""
    if machines.on == "slurm":
        hardware = _hardware_of_job(settings)
        script = slurm_script_of_command(machines, hardware)
        if not options.dry_run:
            return submit_to_slurm(script, hardware, machines, as_json=as_json)
    place = None if options.dry_run else machines.place()
    # Libraries that log to stdout must not stand in the report.
    with redirect_stdout(sys.stderr):
        prepared = prepare(notify=note, place=place, **options.how)
    if options.dry_run:
        files, more = [output_dir / name for name in prepared.file_names], describe(prepared, as_json=as_json)
        more |= {"sbatch": script} if script and as_json else {}
        show_dry_run(prepared.settings, prepared.plan, prepared.samples, files, as_json=as_json, **more)
        if script and not as_json:
            sys.stdout.write(f"The job would be:\n{script}")
        return 0
    common: dict[str, Any] = {"resume": options.resume, "check_nodes": machines.check_nodes, "notify": note}
    if place is not None and not place.is_first:
        with redirect_stdout(sys.stderr):
            run_part(prepared, output_dir, **common)
        tell_place(place)
        return 0
    shown = partial(_view, plan=prepared.plan)
    with redirect_stdout(sys.stderr), progress_on_stderr("starting the ranks", LinesAtTimes(), shown) as on_progress:
        common |= {"on_progress": on_progress, "on_figures": on_progress.tell_figures}
        outcome = run_training(prepared, output_dir, force=options.force, command=command_line(), **common)
    if as_json:
        print(json.dumps(outcome.to_dict() | {"output_dir": str(output_dir)}))
    else:
        show(outcome, output_dir)
        note(f"a report to look at: {output_dir / HTML_FILE}")
    return 0


def _planned_hardware(settings: LaunchedSettings) -> HardwareSpec:
    from ..ds_configs.plan.plan import Plan
    from ..trainers.runs.inputs import chosen_hardware

    plan = getattr(settings, "plan", None)
    return chosen_hardware(settings) if plan is None else Plan.load(plan).hardware


def _hardware_of_job(settings: LaunchedSettings) -> HardwareSpec:
    """Return the hardware that a cluster is asked for.

    Raises:
        UsageError: it is that of this machine, which only submits.
    """
    if getattr(settings, "plan", None) is None and settings.hardware in (None, "local"):
        rule, fix = (
            "must name the nodes of the job, not this machine",
            "such as --hardware 2x8xH100-80GB, or plan first",
        )
        raise UsageError(Fault(where="hardware", value=settings.hardware, rule=rule, fix=fix))
    return _planned_hardware(settings)


def _view(begins: str, console: Console, plan: Plan) -> Bar:
    from .training_live import TrainingView

    return TrainingView(begins, console, plan)


def show_dry_run(
    settings: LaunchedSettings, plan: Plan, samples: Samples, files: list[Path], *, as_json: bool, **more: Any
) -> None:
    """Print the settings, the plan, the data and the files of a training that was not launched.

    Args:
        settings: What was asked for.
        plan: Where everything would go.
        samples: What it would read.
        files: What it would write.
        as_json: One object instead of text.
        more: Further values of that object; as text each is a line.
    """
    from ..ds_configs.plan.plan_json import plan_to_dict
    from .show import console, show_plan, show_settings

    statistics, values = samples.statistics, settings.model_dump()
    if as_json:
        found = {"schema_version": 1, "settings": values, "dataset": asdict(statistics), "plan": plan_to_dict(plan)}
        print(json.dumps(found | more | {"files": [str(file) for file in files]}))
        return
    show_settings(values, settings.origins())
    show_plan(plan, None)
    out = console()
    out.print(
        f"{statistics.train_samples:,} samples of {statistics.source} with {statistics.train_labels:,} labelled tokens "
        f"to train on, {len(samples.evaluation):,} to evaluate on",
        markup=False,
    )
    for name, value in more.items():
        out.print(f"{name.replace('_', ' ')}: {value}", markup=False)
    out.print("A run would write " + ", ".join(str(file) for file in files), markup=False)
