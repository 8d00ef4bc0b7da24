"""Remarks and progress of a command on stderr: a bar on a terminal, else lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ..plugins.launching.notes import NOTE, OnProgress

_SECONDS_BETWEEN_LINES = 15.0


def note(text: str) -> None:
    """Print a remark on stderr."""
    print(f"{NOTE}{text}", file=sys.stderr)


@contextmanager
def progress_on_stderr(begins: str, elsewhere: OnProgress) -> Iterator[OnProgress]:
    """Yield a function that tells what is done and how far it is.

    Args:
        begins: What the bar says until something is told.
        elsewhere: Tells it where stderr is no terminal.
    """
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
        yield elsewhere
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Not `stderr=True`, which would follow a redirection of stdout to it.
    console = Console(file=sys.stderr)
    with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task(begins, total=None)

        def on_progress(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield on_progress


def lines_at_times() -> OnProgress:
    """Return a function that prints how far something is, and what remains, at most every 15 seconds and at the end."""
    began = told = 0.0
    before = last = of = 0

    def on_progress(what: str, done: int, total: int) -> None:
        nonlocal began, told, before, last, of
        now = time.monotonic()
        if total != of or done < last:
            # Something else is being done: its pace is its own.
            began, before = now, done
        last, of = done, total
        if now - told < _SECONDS_BETWEEN_LINES and done < total:
            return
        told = now
        left = f", {(now - began) / (done - before) * (total - done):.0f} s left" if done > before else ""
        note(f"{what} {done} of {total}{left}")

    return on_progress
