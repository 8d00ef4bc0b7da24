"""What the commands that launch a training show: how far it is, what a dry run found, what it would write."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..ds_configs.plan.plan import Plan
    from ..trainers.data.samples import Samples
    from ..trainers.runs.launch import OnStep
    from ..trainers.runs.settings import LaunchedSettings

_SECONDS_BETWEEN_LINES = 15.0


def note(text: str) -> None:
    """Print a remark on stderr."""
    print(f"note: {text}", file=sys.stderr)


@contextmanager
def progress_on_stderr() -> Iterator[OnStep]:
    """Yield a function that tells how far training is and what remains: a bar on a terminal, else a line at times."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    if not sys.stderr.isatty():
        yield _printed_progress()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(file=sys.stderr)
    with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task("starting the ranks", total=None)

        def on_step(done: int, total: int) -> None:
            bar.update(task, description="training", completed=done, total=total)

        yield on_step


def _printed_progress() -> OnStep:
    first: tuple[float, int] | None = None
    told = 0.0

    def on_step(done: int, total: int) -> None:
        nonlocal first, told
        now = time.monotonic()
        began, step = first = first or (now, done)
        if now - told < _SECONDS_BETWEEN_LINES and done < total:
            return
        told = now
        left = f", {(now - began) / (done - step) * (total - done):.0f} s left" if done > step else ""
        print(f"note: step {done} of {total}{left}", file=sys.stderr)

    return on_step


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
