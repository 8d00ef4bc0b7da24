"""`shardwright rehearse` and `tune`: short runs of a plan, on CPU ranks with a small model or on this machine."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from ...ds_configs.plan.plan import plan_to_dict
from ...ds_configs.plan.rendering import planned_training_arguments, train_arguments
from ...ds_configs.specs.errors import ConfigError, UsageError
from ..options import OutputDirectory
from ..progress import progress_on_stderr
from ..settings import FILLED, Options, command_line

if TYPE_CHECKING:
    from ...ds_configs.plan.plan import Plan
    from ...trainers.rehearsal.checks import Rehearsal


class RehearseFlags(OutputDirectory):
    group = "Rehearsal"

    ranks: int | None = Field(None, description="CPU ranks. Default: 2, or the fewest that the layout allows")
    steps: int = Field(8, description="Optimizer steps, at least 4")
    script: Path | None = Field(None, description="Your own script to run instead, with a smaller model")
    time_limit: float = Field(600.0, description="Time limit of each of the two launches, in seconds")
    output_dir: Path | None = Field(
        None,
        description="Directory for the report. Default: rehearsal in the plan's directory",
    )


def rehearse_command(plan_dir: Path, *arguments: str, options: Options[RehearseFlags] = FILLED) -> int:
    """Launch the files of a plan on CPU ranks with a smaller model, and check that every part works.

    The exit code is 2 for an error in the files, and 1 if a rank or a check fails.

    Parameters
    ----------
    plan_dir
        Directory that `plan` wrote, with its files as they are now.
    arguments
        Arguments of the script; put `--` before arguments that begin with a hyphen.
    """
    if arguments and options.script is None:
        rule, fix = "need a script", "pass --script, or omit them"
        raise UsageError(ConfigError(where="arguments", value=" ".join(arguments), rule=rule, fix=fix))
    from ...trainers.rehearsal.rehearse import rehearse

    # Some libraries log to stdout, which is for results only.
    with progress_on_stderr("", lambda _: None), redirect_stdout(sys.stderr):
        rehearsal = rehearse(
            plan_dir,
            ranks=options.ranks,
            steps=options.steps,
            time_limit_seconds=options.time_limit,
            output_dir=options.output_dir,
            force=options.force,
            script=options.script,
            script_arguments=arguments,
            command=command_line(),
        )
    if options.as_json:
        print(json.dumps(rehearsal.to_dict()))
    else:
        show_rehearsal(rehearsal)
    if rehearsal.failure is not None:
        print(f"error: {rehearsal.failure.name}: {rehearsal.failure.detail}", file=sys.stderr)
    return rehearsal.exit_code


def show_rehearsal(rehearsal: Rehearsal) -> None:
    from rich.text import Text

    from ..show import console, print_rows

    out = console()
    layout, hardware = rehearsal.plan.chosen.layout.label, rehearsal.plan.hardware.name
    rehearsed = f"  {layout} for {hardware}, rehearsed on {rehearsal.ranks} CPU ranks"
    out.print(Text.assemble((rehearsal.plan.model.name, "bold"), rehearsed))
    out.print()
    styles = {True: ("passed", "green"), False: ("FAILED", "bold red"), None: ("-     ", "dim")}
    width = max(len(check.name) for check in rehearsal.checks)
    for check in rehearsal.checks:
        first_line = check.detail.partition("\n")[0]
        out.print(Text.assemble(f"{check.name:{width}}  ", styles[check.passed], f"  {first_line}"))
    if rehearsal.measured:
        out.print()
        predicted, measured = rehearsal.predicted or {}, rehearsal.measured or {}
        phases = list(measured)

        def cell(own: int, planned: int) -> str:
            return f"{own / 1e6:.2f} / {planned / 1e6:.2f}" if own or planned else ""

        rows = [
            (role, *(cell(measured[phase][role], predicted[phase][role]) for phase in phases))
            for role in next(iter(measured.values()), {})
        ]
        totals = [
            (sum(roles.values()), sum(predicted[phase][role] for role in roles)) for phase, roles in measured.items()
        ]
        rows.append(("total", *(cell(own, planned) for own, planned in totals)))
        title = "MB on the fullest rank, measured / predicted"
        print_rows(out, ("", *phases), rows, title=title, figures=phases)
        if host := rehearsal.host:
            out.print(f"Layer inputs in host memory: {cell(host['measured'], host['predicted'])} MB")
    rows = []
    for change in rehearsal.changes:
        values = ("-" if value is None else str(value) for value in (change.before, change.after))
        # The name of a file is enough.
        before, after = (Path(value).name if value.startswith("/") else value for value in values)
        if before != after:
            rows.append((change.where, before, after))
    if rows:
        out.print()
        print_rows(out, ("value", "plan", "rehearsal"), rows, title="Scaled for the rehearsal")
    from ...plugins.transformers.training_arguments import PACKAGES, missing_packages

    planned = planned_training_arguments(rehearsal.plan)
    missing = missing_packages(planned)
    for argument in (name for name in PACKAGES if planned.get(name)):
        package, note = PACKAGES[argument][0], ""
        if argument in missing:
            note = f"; it is not installed here: pip install {package}"
        out.print(f"Not rehearsed: {package}, which {argument} needs on GPUs{note}", markup=False)
    out.print()
    verdict = "Passed" if rehearsal.passed else "Failed"
    style = "bold green" if rehearsal.passed else "bold red"
    files = f"; see {', '.join(rehearsal.files)}" if rehearsal.files else ""
    out.print(Text.assemble((verdict, style), f" in {rehearsal.seconds:.0f} s{files}"))


class TuneFlags(OutputDirectory):
    group = "Tuning"

    trials: int = Field(5, description="Maximum number of layouts to measure")
    steps: int = Field(5, description="Timed steps of each layout, after two others")
    time_limit: float = Field(30.0, description="Time limit of all trials, in minutes")
    output_dir: Path | None = Field(
        None, description="Directory for the tuned plan. Default: tuned in the plan's directory"
    )


def tune_command(plan_dir: Path, *, options: Options[TuneFlags] = FILLED) -> int:
    """Measure the best predicted layouts on this machine, each for a few steps, and write the plan of the fastest.

    The exit code is 1 if no layout was measured.

    Parameters
    ----------
    plan_dir
        Directory that `plan` wrote.
    """
    from ...trainers.tuning import tune

    output_dir = options.output_dir or (plan_dir if plan_dir.is_dir() else plan_dir.parent) / "tuned"
    # Some libraries log to stdout, which is for results only.
    with progress_on_stderr(""), redirect_stdout(sys.stderr):
        plan = tune(
            plan_dir,
            trials=options.trials,
            steps=options.steps,
            time_limit_minutes=options.time_limit,
            output_dir=output_dir,
            force=options.force,
            command=command_line(),
        )
    if options.as_json:
        print(json.dumps(plan_to_dict(plan)))
    else:
        show_tuned(plan, output_dir)
    return 0


def show_tuned(plan: Plan, directory: Path) -> None:
    from rich.text import Text

    from ...ds_configs.search.reasons import display_name
    from ...trainers.reports.runs import trial_rows
    from ..show import console, print_rows, show_next

    out = console()
    layout = display_name(plan.chosen.layout)
    count = "1 layout" if len(plan.trials) == 1 else f"{len(plan.trials)} layouts"
    out.print(Text.assemble((plan.model.name, "bold"), f"  on {plan.hardware.name}, {count}"))
    out.print()
    headings, rows = trial_rows(plan.trials)
    print_rows(out, headings, rows, figures=headings[3:])
    out.print()
    out.print(Text.assemble(("Chosen  ", "bold green"), (layout, "bold")))
    out.print(plan.chosen.reason, markup=False)
    out.print()
    out.print(f"Files in {directory}: {', '.join(plan.file_names)}, report.html", markup=False)
    show_next(*train_arguments(plan, directory=str(directory)))
