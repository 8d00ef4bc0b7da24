"""`shardwright tune`: measure the best layouts of a plan in short real runs, and keep the fastest."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from ...ds_configs.plan.plan import plan_to_dict
from ...ds_configs.plan.rendering import train_arguments
from ..options import OutputDirectory
from ..progress import progress_on_stderr
from ..settings import FILLED, Options, command_line

if TYPE_CHECKING:
    from ...ds_configs.plan.plan import Plan


class Flags(OutputDirectory):
    group = "Tuning"

    trials: int = Field(5, description="Maximum number of layouts to measure")
    steps: int = Field(5, description="Timed steps of each layout, after two others")
    time_limit: float = Field(30.0, description="Time limit of all trials, in minutes")
    output_dir: Path | None = Field(
        None, description="Directory for the tuned plan. Default: tuned in the plan's directory"
    )


def tune_command(plan_dir: Path, *, options: Options[Flags] = FILLED) -> int:
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
