"""Remarks and progress of a command on stderr: a bar on a terminal, else lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from ..plugins.launching.notes import NOTE, OnProgress

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn

_SECONDS_BETWEEN_LINES = 15.0
_NARROW, _WIDE = 60, 100
"""Columns below which a bar has no room beside its figures, and below which it is short."""
Shown = TypeVar("Shown", bound=OnProgress)


def note(text: str) -> None:
    """Print a remark on stderr."""
    print(f"{NOTE}{text}", file=sys.stderr)


class LinesAtTimes:
    """Progress as lines on stderr: how far something is, and what remains, at most every 15 seconds and at the end."""

    def __init__(self) -> None:
        self.figures: object = ""
        self._began = self._told = 0.0
        self._before = self._last = self._of = 0

    def tell_figures(self, figures: object) -> None:
        """Take what the next line says beside its numbers, such as a loss: its text."""
        self.figures = figures

    def __call__(self, what: str, done: int, total: int) -> None:
        """Print a line where it is time."""
        now = time.monotonic()
        if total != self._of or done < self._last:
            # Something else is being done: its pace is its own.
            self._began, self._before = now, done
        self._last, self._of = done, total
        if now - self._told < _SECONDS_BETWEEN_LINES and done < total:
            return
        self._told = now
        seconds = (now - self._began) / (done - self._before) * (total - done) if done > self._before else None
        left = "" if seconds is None else f"{seconds:.0f} s left"
        note(", ".join(text for text in (f"{what} {done} of {total}", str(self.figures), left) if text))


class Bar:
    """Progress as a bar on a terminal, as wide as that is."""

    def __init__(self, begins: str, console: Console) -> None:
        # Without room for both, what is done stands where its figures will.
        self._narrow = console.width < _NARROW
        self._figures = ""
        self.shown = self._progress(*_columns(console.width), console=console, transient=True)
        self._task = self.shown.add_task(begins, total=None, figures=begins if self._narrow else "")

    def _progress(self, *columns: ProgressColumn, **how: Any) -> Progress:
        from rich.progress import Progress

        return Progress(*columns, **how)

    def tell_figures(self, figures: object) -> None:
        """Show a text beside the bar from now on, such as a loss."""
        self._figures = str(figures)

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show what is done, how much of it is, and how much there is."""
        figures = self._figures or (what if self._narrow else "")
        self.shown.update(self._task, description=what, completed=done, total=total, figures=figures)


def _columns(width: int) -> tuple[ProgressColumn, ...]:
    """Return the parts of a bar; on a narrow terminal numbers, figures and the time that is left alone."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    what, figures = TextColumn("{task.description}", markup=False), TextColumn("{task.fields[figures]}", markup=False)
    count, left = MofNCompleteColumn(), TimeRemainingColumn(compact=True)
    if width < _NARROW:
        return count, figures, left
    if width < _WIDE:
        return what, BarColumn(bar_width=16), count, figures, left, TextColumn("left")
    return what, BarColumn(), count, figures, TimeElapsedColumn(), TextColumn("left"), left


@contextmanager
def progress_on_stderr(
    begins: str, elsewhere: Shown, shown: Callable[[str, Console], Bar] = Bar
) -> Iterator[Bar | Shown]:
    """Yield a function that tells what is done and how far it is.

    Args:
        begins: What the bar says until something is told.
        elsewhere: Tells it where stderr is no terminal.
        shown: Makes what shows it on a terminal.
    """
    if not sys.stderr.isatty():
        yield elsewhere
        return
    from rich.console import Console

    # Not `stderr=True`, which would follow a redirection of stdout to it.
    bar = shown(begins, Console(file=sys.stderr))
    with bar.shown:
        yield bar
