"""Notes and progress of a command on stderr: a bar on a terminal, else lines."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..plugins.launching.messages import NOTE, Figures, Progress

if TYPE_CHECKING:
    from rich.console import Console

    from ..ds_configs.plan.plan import Plan

_SECONDS_BETWEEN_LINES = 15.0
_LOGGERS = ("trainers", *(f"plugins.{name}" for name in ("clusters", "huggingface_hub", "launching", "planning")))
"""Packages whose log messages are printed."""
_NARROW = 60
"""Columns below which there is no bar."""
Draw = Callable[[Progress], None]


class _Handler(logging.Handler):
    """Passes logged progress to a bar or to lines; without either, prints the other messages on stderr."""

    def __init__(self, draw: Draw | None = None) -> None:
        super().__init__()
        self._draw = draw

    def emit(self, record: logging.LogRecord) -> None:
        progress = getattr(record, "progress", None)
        if self._draw is None and progress is None:
            note(record.getMessage())
        elif self._draw is not None and progress is not None:
            self._draw(progress)


@contextmanager
def notes_on_stderr(draw: Draw | None = None) -> Iterator[None]:
    """Print the log messages of the run pipeline on stderr during the block, or pass its progress to `draw`."""
    handler = _Handler(draw)
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


def note(text: str) -> None:
    print(f"{NOTE}{text}", file=sys.stderr)


class Lines:
    """Progress as lines on stderr, at most every 15 seconds and at the end."""

    def __init__(self, plan: Plan | None = None) -> None:
        self._plan = plan
        self._began = self._printed = 0.0
        self._before = self._last = self._of = 0

    def __call__(self, progress: Progress) -> None:
        """Print a line if 15 seconds passed since the last one, or the stage is done."""
        now, done, total = time.monotonic(), progress.done, progress.total
        if total != self._of or done < self._last:
            # A new stage has its own speed.
            self._began, self._before = now, done
        self._last, self._of = done, total
        if now - self._printed < _SECONDS_BETWEEN_LINES and done < total:
            return
        self._printed = now
        seconds = (now - self._began) / (done - self._before) * (total - done) if done > self._before else None
        left = "" if seconds is None else f"{seconds:.0f} s left"
        texts = (f"{progress.what} {done} of {total}", compared(progress.figures, self._plan), left)
        note(", ".join(text for text in texts if text))


class Bar:
    """Progress as a bar, with the figures of a training below it."""

    def __init__(self, begins: str, console: Console, plan: Plan | None = None) -> None:
        from rich.console import Group
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress
        from rich.text import Text

        what, count = TextColumn("{task.description}", markup=False), MofNCompleteColumn()
        left = TimeRemainingColumn(compact=True), TextColumn("left")
        wide = what, BarColumn(), count, TimeElapsedColumn(), *left
        self._plan, self._figures = plan, ""
        self._bar = RichProgress(*((what, count, *left) if console.width < _NARROW else wide))
        self._task = self._bar.add_task(begins, total=None)
        self.shown = Live(get_renderable=lambda: Group(self._bar, Text(self._figures)), console=console, transient=True)

    def __call__(self, progress: Progress) -> None:
        """Show the stage, how much of it is done, and its figures."""
        self._figures = compared(progress.figures, self._plan)
        self._bar.update(self._task, description=progress.what, completed=progress.done, total=progress.total)


def compared(figures: Figures, plan: Plan | None) -> str:
    """Return loss, speed and memory of a training, beside what was planned."""
    texts = [] if figures.loss is None else [f"loss {figures.loss:.3f}"]
    # A plan counts every position, also those that padding fills.
    if (speed := figures.tokens_per_second) is not None:
        share = 0.0 if plan is None else (figures.positions_per_second or speed) / plan.chosen.time.tokens_per_second
        texts.append(f"{speed:,.0f} tokens/s" + (f" ({share:.0%} of the plan)" if plan else ""))
    if (peak := figures.peak_allocated_gb) is not None:
        gpu = None if plan is None else plan.chosen.memory.gpu
        texts.append(f"{peak:.1f} GB" + (f" of {gpu.allocated_bytes / 1e9:.1f} planned" if gpu else ""))
    return ", ".join(texts)


@contextmanager
def progress_on_stderr(begins: str, elsewhere: Draw | None = None, plan: Plan | None = None) -> Iterator[None]:
    """Show the progress that is logged during the block: a bar on a terminal, else `elsewhere`, by default lines."""
    if not sys.stderr.isatty():
        with notes_on_stderr(elsewhere or Lines(plan)):
            yield
        return
    from rich.console import Console

    # Not `stderr=True`, which follows redirections.
    bar = Bar(begins, Console(file=sys.stderr), plan)
    with bar.shown, notes_on_stderr(bar):
        yield
