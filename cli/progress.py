"""Notes and progress of a command on stderr: a bar on a terminal, else lines."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from ..plugins.launching.messages import NOTE, OnProgress, Progress

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress
    from rich.progress import ProgressColumn

_SECONDS_BETWEEN_LINES = 15.0
_LOGGERS = ("trainers", "plugins.launching", "plugins.clusters", "plugins.huggingface_hub")
"""Packages whose log messages are printed."""
_NARROW, _WIDE = 60, 100
"""Below the first width there is no bar, only figures; below the second the bar is short."""
Shown = TypeVar("Shown", bound=OnProgress)


class _Notes(logging.Handler):
    """Prints log messages on stderr, except progress."""

    def emit(self, record: logging.LogRecord) -> None:
        if not hasattr(record, "progress"):
            note(record.getMessage())


class _Drawing(logging.Handler):
    """Passes logged progress to a bar or to lines."""

    def __init__(self, draw: OnProgress) -> None:
        super().__init__()
        self._draw = draw

    def emit(self, record: logging.LogRecord) -> None:
        progress: Progress | None = getattr(record, "progress", None)
        if progress is None:
            return
        if isinstance(self._draw, LinesAtTimes | Bar):
            self._draw.tell_figures(progress.figures)
        self._draw(progress.what, progress.done, progress.total)


@contextmanager
def _handled(handler: logging.Handler) -> Iterator[None]:
    """Pass the log messages of the run pipeline to a handler."""
    loggers = [logging.getLogger(f"shardwright.{name}") for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)


def notes_on_stderr() -> AbstractContextManager[None]:
    """Print the log messages of the run pipeline on stderr during the block."""
    return _handled(_Notes())


def note(text: str) -> None:
    print(f"{NOTE}{text}", file=sys.stderr)


class LinesAtTimes:
    """Progress as lines on stderr, at most every 15 seconds and at the end."""

    def __init__(self) -> None:
        self.figures: object = ""
        self._began = self._printed = 0.0
        self._before = self._last = self._of = 0

    def tell_figures(self, figures: object) -> None:
        """Set the text after the numbers of the next line, such as a loss."""
        self.figures = figures

    def __call__(self, what: str, done: int, total: int) -> None:
        """Print a line if 15 seconds passed since the last one, or the stage is done."""
        now = time.monotonic()
        if total != self._of or done < self._last:
            # A new stage has its own speed.
            self._began, self._before = now, done
        self._last, self._of = done, total
        if now - self._printed < _SECONDS_BETWEEN_LINES and done < total:
            return
        self._printed = now
        seconds = (now - self._began) / (done - self._before) * (total - done) if done > self._before else None
        left = "" if seconds is None else f"{seconds:.0f} s left"
        note(", ".join(text for text in (f"{what} {done} of {total}", str(self.figures), left) if text))


class Bar:
    """Progress as a bar, as wide as the terminal."""

    def __init__(self, begins: str, console: Console) -> None:
        # A narrow terminal shows the stage in place of the figures, until there are any.
        self._narrow = console.width < _NARROW
        self._figures = ""
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        what, figures = (TextColumn(f"{{task.{name}}}", markup=False) for name in ("description", "fields[figures]"))
        count, left, unit = MofNCompleteColumn(), TimeRemainingColumn(compact=True), TextColumn("left")
        columns: tuple[ProgressColumn, ...]
        columns = what, BarColumn(), count, figures, TimeElapsedColumn(), unit, left
        if self._narrow:
            columns = count, figures, left
        elif console.width < _WIDE:
            columns = what, BarColumn(bar_width=16), count, figures, left, unit
        self.shown = self._progress(*columns, console=console, transient=True)
        self._task = self.shown.add_task(begins, total=None, figures=begins if self._narrow else "")

    def _progress(self, *columns: ProgressColumn, **options: Any) -> RichProgress:
        from rich.progress import Progress as RichProgress

        return RichProgress(*columns, **options)

    def tell_figures(self, figures: object) -> None:
        """Set the text after the bar, such as a loss."""
        self._figures = str(figures)

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show the stage and how much of it is done."""
        figures = self._figures or (what if self._narrow else "")
        self.shown.update(self._task, description=what, completed=done, total=total, figures=figures)


@contextmanager
def progress_on_stderr(
    begins: str, elsewhere: Shown, shown: Callable[[str, Console], Bar] = Bar
) -> Iterator[Bar | Shown]:
    """Show the progress that is logged during the block, and yield the object that shows it."""
    if not sys.stderr.isatty():
        with _handled(_Drawing(elsewhere)):
            yield elsewhere
        return
    from rich.console import Console

    # Not `stderr=True`, which follows redirections.
    bar = shown(begins, Console(file=sys.stderr))
    with bar.shown, _handled(_Drawing(bar)):
        yield bar
