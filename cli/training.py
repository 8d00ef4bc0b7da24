"""What all commands that launch a training share: dry run, progress and results."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console, RenderableType
from rich.progress import Progress, ProgressColumn
from rich.table import Table
from rich.text import Text

from ..ds_configs.plan.plan import Plan
from ..ds_configs.specs.errors import UsageError, collecting
from .machines import MachineOptions
from .options import TrainingOptions
from .progress import Bar, LinesAtTimes, note, progress_on_stderr
from .settings import command_line, full_command_line

if TYPE_CHECKING:
    from rich.console import Console

    from ..ds_configs.plan.plan import Plan
    from ..plugins.launching.messages import Figures
    from ..trainers.data.samples import Samples
    from ..trainers.runs.report import LaunchedOutcome
    from ..trainers.runs.run import PreparedTraining
    from ..trainers.runs.settings import LaunchedSettings, RunRequest

Outcome = TypeVar("Outcome", bound="LaunchedOutcome")


def launched_command(
    prepare: Callable[[RunRequest], PreparedTraining[Outcome]],
    options: TrainingOptions,
    machines: MachineOptions,
    show: Callable[[Outcome, Path], None],
    describe: Callable[..., dict[str, Any]] = lambda prepared, as_json: {},
) -> int:
    """Prepare, launch and report a training run, and return the exit code.

    `describe` returns what a dry run prints in addition to settings, plan and data.
    """
    from ..trainers.reports.make import REPORT_FILE as HTML_FILE
    from ..trainers.runs.run import run_part, run_training
    from ..trainers.runs.settings import RunRequest

    output_dir, as_json, errors = options.output_dir, options.as_json, machines.errors()
    request = RunRequest(
        output_dir=output_dir,
        resume=options.resume,
        force=options.force,
        dry_run=options.dry_run,
        place=None if options.dry_run or errors else machines.place(),
        check_nodes=machines.check_nodes,
        command=command_line(),
        full_command=full_command_line(),
    )
    prepared = None
    # Some libraries log to stdout, which is for results only.
    with collecting(errors), redirect_stdout(sys.stderr):
        prepared = prepare(request)
    if errors:
        raise UsageError(errors)
    assert prepared is not None, "a failed preparation left an error"
    if options.dry_run:
        files, more = [output_dir / name for name in prepared.file_names], describe(prepared, as_json=as_json)
        show_dry_run(prepared.settings, prepared.plan, prepared.samples, files, as_json=as_json, **more)
        return 0
    if request.place is not None and not request.place.is_first:
        with redirect_stdout(sys.stderr):
            run_part(prepared)
        note(f"machine {request.place.rank} is done; the results are on {request.place.main_address}")
        return 0
    view = partial(TrainingView, plan=prepared.plan)
    with redirect_stdout(sys.stderr), progress_on_stderr("starting the ranks", LinesAtTimes(), view):
        outcome = run_training(prepared)
    if as_json:
        print(json.dumps(outcome.to_dict() | {"output_dir": str(output_dir)}))
    else:
        show(outcome, output_dir)
        note(f"HTML report: {output_dir / HTML_FILE}")
    return 0


def show_outcome(
    outcome: LaunchedOutcome,
    output_dir: Path,
    *,
    name: str,
    made: str,
    chart: str,
    noun: str,
    rows: Sequence[Sequence[str | Text]] = (),
    facts: Sequence[tuple[str, str]] = (),
) -> None:
    """Print the results on the held-out samples, and the files.

    By default, `rows` are the measures of the outcome, with the second value highlighted.
    """
    from ..plugins.huggingface_hub.push import CARD_FILE
    from ..trainers.runs.settings import REPORT_FILE
    from .show import console, print_rows

    out = console()
    label, hardware = outcome.plan.chosen.strategy.label, outcome.plan.hardware.name
    out.print(Text.assemble((name, "bold"), f"  {made}, {label} on {hardware}"))
    out.print()
    headings, measured = outcome.measures()
    rows = rows or [(row[0], row[1], Text(row[2], style="bold green"), *row[3:]) for row in measured]
    on = f"{outcome.statistics.evaluation_samples} held-out samples"
    print_rows(out, (on, *headings[1:]), rows, block_title=on, figures=headings[1:])
    out.print()
    for fact, value in facts:
        out.print(f"  {fact}: {value}", markup=False)
    out.print(outcome.speed_line())
    files = ", ".join(str(output_dir / file) for file in (REPORT_FILE, CARD_FILE, chart))
    out.print(f"{noun} in {output_dir}; see {files}", markup=False)


def show_dry_run(
    settings: LaunchedSettings, plan: Plan, samples: Samples, files: list[Path], *, as_json: bool, **more: Any
) -> None:
    """Print settings, plan, data and files of a run that was not launched, as text or one JSON object."""
    from ..ds_configs.plan.plan import plan_to_dict
    from .show import console, show_plan, show_settings

    statistics, values = samples.statistics, settings.model_dump()
    if as_json:
        shown = {"schema_version": 1, "settings": values, "dataset": asdict(statistics), "plan": plan_to_dict(plan)}
        print(json.dumps(shown | more | {"files": [str(file) for file in files]}))
        return
    show_settings(values, settings.origins())
    show_plan(plan, None, output_dir_hint=False)
    out = console()
    out.print(
        f"{statistics.train_samples:,} samples of {statistics.source} with {statistics.train_labels:,} labelled tokens "
        f"to train on, {len(samples.evaluation):,} to evaluate on",
        markup=False,
    )
    for name, value in more.items():
        out.print(f"{name.replace('_', ' ')}: {value}", markup=False)
    out.print("A run would write " + ", ".join(str(file) for file in files), markup=False)


_SLOW_RANK_RATIO = 1.1
"""A rank is reported as slow above this multiple of the median; less is noise."""
_SLOW_SHARE = 0.8
"""A speed below this share of the planned one is shown as a warning."""


class TrainingView(Bar):
    """Bar of optimizer steps, with loss, speed, memory and slowest rank below it."""

    def __init__(self, begins: str, console: Console, plan: Plan) -> None:
        self._plan = plan
        self._latest: Figures | None = None
        super().__init__(begins, console)

    def tell_figures(self, figures: object) -> None:
        """Set the figures to show."""
        self._latest = figures  # type: ignore[assignment]

    def _progress(self, *columns: ProgressColumn, **options: Any) -> Progress:
        return _WithFigures(self, *columns, **options)

    def rows(self) -> list[tuple[str, Text]]:
        """Return the known figures by name."""
        if self._latest is None:
            return []
        figures = self._latest
        rows = [] if figures.loss is None else [("loss", Text(f"{figures.loss:.4f}"))]
        gpu, planned = self._plan.chosen.memory.gpu, self._plan.chosen.time.tokens_per_second
        if (speed := figures.tokens_per_second) is not None:
            # A plan counts every position, also those that padding fills.
            positions = figures.positions_per_second
            share = (speed if positions is None else positions) / planned
            # For CPU ranks the plan predicts an order of magnitude only.
            slow = share < _SLOW_SHARE and self._plan.hardware.gpu != "CPU"
            counts = f"{speed:,.0f}"
            if positions is not None and (labelled := figures.labelled_tokens_per_second) is not None:
                if positions > 1.01 * speed:
                    counts += f", {labelled:,.0f} with a label; {positions:,.0f} with padding"
                elif labelled < 0.9 * speed:
                    # Packed rows have no padding, but the tokens of prompts.
                    counts += f" ({labelled:,.0f} with a label)"
            comparison = f" of {planned:,.0f} planned ({100 * share:.0f} %)"
            style = "yellow" if slow else "dim"
            rows.append(("tokens/s", Text.assemble(counts, (comparison, style))))
        if (peak := figures.peak_allocated_gb) is not None:
            planned_gb = gpu.allocated_bytes / 1e9
            comparison = f" GB of tensors, {planned_gb:.1f} planned, {gpu.capacity_bytes / 1e9:.1f} available"
            style = "yellow" if peak > 1.05 * planned_gb else "dim"
            rows.append(("memory", Text.assemble(f"{peak:.1f}", (comparison, style))))
        if figures.slowest_rank is not None and figures.slowest_rank_ratio is not None:
            ratio = f"{figures.slowest_rank_ratio:.2f} times the median"
            text = Text(f"equally fast; the slowest takes {ratio}", style="dim")
            if figures.slowest_rank_ratio >= _SLOW_RANK_RATIO:
                slow_rank = f"rank {figures.slowest_rank} is slow: {ratio} to load data and run a forward pass"
                text = Text(slow_rank, style="yellow")
            rows.append(("ranks", text))
        return rows


class _WithFigures(Progress):
    """Progress with the rows of a view below its bar."""

    def __init__(self, view: TrainingView, *columns: ProgressColumn, **options: Any) -> None:
        self._view = view
        super().__init__(*columns, **options)

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield the bar and the rows."""
        yield from super().get_renderables()
        if rows := self._view.rows():
            table = Table.grid(padding=(0, 2))
            for name, text in rows:
                table.add_row(Text(name, style="bold"), text)
            yield table
