"""`shardwright rehearse`: prove a plan's files on CPU ranks before they cost GPU hours."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from ...ds_configs.specs.errors import Fault, UsageError
from ...ds_configs.specs.settings import Paths
from ..command_line import command_line
from ..options import ReportOptions
from ..progress import note, progress_on_stderr
from ..settings import FILLED, Options, grouped

if TYPE_CHECKING:
    from ...trainers.rehearsal.report import Rehearsal


@grouped
class RehearseOptions(ReportOptions):
    """Course of a rehearsal."""

    group = "Rehearsal"

    ranks: int | None = Field(
        None, description="CPU ranks to start. Default 2, or the smallest number that the layout allows"
    )
    steps: int = Field(8, description="Optimizer steps, at least 4")
    nodes_as_ranks: bool = Field(
        False,
        description="Start one launcher for each node of the plan on this machine, by default with one rank each",
    )
    script: Path | None = Field(
        None, description="Your own script to run instead, with a shrunken model; its arguments follow the plan's place"
    )
    text: Paths = Field((), description="Files to train on, byte by byte. Default: synthetic tokens")
    time_limit: float = Field(600.0, description="Seconds that one of the two launches may take")
    output_dir: Path | None = Field(
        None,
        description="Where report, figures and chart go. Default: rehearsal in the plan's directory",
    )


def rehearse_command(plan_dir: Path, *arguments: str, options: Annotated[RehearseOptions, Options] = FILLED) -> int:
    """Launch a plan's own files on CPU ranks with a shrunken model, and check that every part works.

    Exit code 2 for a fault in the files, 1 when a rank or a check fails. Examples: shardwright rehearse plan ;
    shardwright rehearse plan --ranks 4 --steps 12 ; shardwright rehearse plan --script finetune.py -- --epochs 1

    Parameters
    ----------
    plan_dir
        Directory that `plan` wrote; its files are taken as they are now.
    arguments
        Of the script, behind `--` where they begin with a hyphen.
    """
    if arguments and options.script is None:
        rule, fix = "are for a script, and none is named", "give --script, or leave them out"
        raise UsageError(Fault(where="arguments", value=" ".join(arguments), rule=rule, fix=fix))
    from ...trainers.rehearsal.rehearse import rehearse

    # Libraries that log to stdout must not stand in the report.
    with progress_on_stderr("", lambda *_: None) as on_progress, redirect_stdout(sys.stderr):
        found = rehearse(
            plan_dir,
            ranks=options.ranks,
            steps=options.steps,
            nodes_as_ranks=options.nodes_as_ranks,
            text=options.text,
            time_limit_seconds=options.time_limit,
            output_dir=options.output_dir,
            force=options.force,
            script=options.script,
            script_arguments=arguments,
            notify=note,
            on_progress=on_progress,
            command=command_line(),
        )
    if options.as_json:
        print(json.dumps(found.to_dict()))
    else:
        show_rehearsal(found)
    if found.failure is not None:
        print(f"error: {found.failure.name}: {found.failure.detail}", file=sys.stderr)
    return found.exit_code


def show_rehearsal(found: Rehearsal) -> None:
    """Print the checks, what was scaled, and measured beside predicted memory."""
    from rich.table import Table
    from rich.text import Text

    from ..show import console

    out = console()
    strategy, hardware = found.plan.chosen.strategy.label, found.plan.hardware.name
    launchers = "" if found.nodes == 1 else f" of {found.nodes} launchers"
    rehearsed = f"  {strategy}, planned for {hardware}, rehearsed on {found.ranks} CPU ranks{launchers}"
    out.print(Text.assemble((found.plan.model.name, "bold"), rehearsed))
    out.print()
    checks = Table(box=None, pad_edge=False, show_header=False)
    styles = {True: ("passed", "green"), False: ("FAILED", "bold red"), None: ("-", "dim")}
    for check in found.checks:
        word, style = styles[check.passed]
        checks.add_row(check.name, Text(word, style=style), Text(check.detail.partition("\n")[0]))
    out.print(checks)
    if found.measured:
        out.print()
        _show_memory(found)
    if found.changes:
        out.print()
        _show_changes(found)
    out.print()
    verdict = "Passed" if found.passed else "Failed"
    style = "bold green" if found.passed else "bold red"
    files = f"; see {', '.join(found.files)}" if found.files else ""
    out.print(Text.assemble((verdict, style), f" in {found.seconds:.0f} s{files}"))


def _show_memory(found: Rehearsal) -> None:
    from ..show import console, print_rows

    predicted, measured = found.predicted or {}, found.measured or {}
    phases = [phase for phase in measured if phase in predicted]

    def cell(one: int, other: int) -> str:
        return f"{one / 1e6:.2f} / {other / 1e6:.2f}" if one or other else ""

    rows = [
        (role, *(cell(measured[phase][role], predicted[phase].roles[role]) for phase in phases))
        for role in next(iter(measured.values()), {})
    ]
    totals = [(sum(measured[phase].values()), sum(predicted[phase].roles.values())) for phase in phases]
    rows.append(("together", *(cell(one, other) for one, other in totals)))
    title = "MB on the fullest rank, measured / predicted"
    print_rows(console(), ("", *phases), rows, title=title, figures=phases)


def _show_changes(found: Rehearsal) -> None:
    from ..show import console, print_rows

    rows = []
    for change in found.changes:
        values = ("-" if value is None else str(value) for value in (change.before, change.after))
        # Of a file that lies elsewhere the name is enough.
        before, after = (Path(value).name if value.startswith("/") else value for value in values)
        if before != after:
            rows.append((change.where, _short(before), _short(after)))
    print_rows(console(), ("value", "plan", "rehearsal"), rows, title="Scaled for the rehearsal")


def _short(text: str, longest: int = 30) -> str:
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
