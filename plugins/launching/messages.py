"""Messages from ranks to the process that launched them: JSON lines with a `type`, among anything else ranks print.

Code that runs in the launching process or on ranks logs: text as usual, progress with `log_progress`. On the first rank
`forwarded_logs` sends both to the launcher, which reads them in `launch_ranks` and logs them. The command shows what
is logged on stderr; a Python program does so after `logging.basicConfig(level=logging.INFO)`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

LAUNCH_TOKEN = "SHARDWRIGHT_LAUNCH_TOKEN"  # noqa: S105
"""Environment variable that identifies every process of a launch; if it is set, a launcher reads messages."""
NOTE = "note: "
"""Prefix of a line for people."""
_START = '{"type": "shardwright.'

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Figures of a training in progress; `None` for those that are not known yet."""

    loss: float | None = None
    """The last one logged."""
    tokens_per_second: float | None = None
    """Of all ranks, since the second step."""
    positions_per_second: float | None = None
    """The same with padding, which a plan's tokens/s count."""
    peak_allocated_gb: float | None = None
    """Peak memory of tensors on the accelerator that uses most."""

    def __str__(self) -> str:
        """Return loss and speed for a progress line.

        >>> str(Figures(loss=2.3126, tokens_per_second=1204.4))
        'loss 2.313, 1,204 tokens/s'
        """
        loss = "" if self.loss is None else f"loss {self.loss:.3f}"
        speed = "" if self.tokens_per_second is None else f"{self.tokens_per_second:,.0f} tokens/s"
        return ", ".join(figure for figure in (loss, speed) if figure)


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Progress of a run."""

    what: str
    """What is being done, such as `step`."""
    done: int
    total: int
    figures: Figures = field(default_factory=Figures)
    """Of a training."""

    def __str__(self) -> str:
        return ", ".join(part for part in (f"{self.what} {self.done} of {self.total}", str(self.figures)) if part)


Message = str | Progress
"""A sentence for the user, or progress."""


def send(message: Message) -> None:
    """Send a message to the process that launched this rank; without a launcher, print sentences and drop progress."""
    if LAUNCH_TOKEN not in os.environ:
        if isinstance(message, str):
            print(f"{NOTE}{message}", file=sys.stderr, flush=True)
        return
    line: dict[str, Any] = {"type": "shardwright.note", "text": message}
    if isinstance(message, Progress):
        line = {"type": "shardwright.progress"} | asdict(message)
    # Ranks share one output, where a progress bar may have left its line unfinished.
    print(f"\n{json.dumps(line, ensure_ascii=False)}", flush=True)


def note_on_first_rank(text: str) -> None:
    """Send a sentence, on the first rank only."""
    if os.environ.get("RANK", "0") == "0":
        send(" ".join(text.splitlines()))


def read_message(line: str) -> Message | None:
    """Return the message in a line that a rank printed; `None` for other lines.

    >>> read_message('{"type": "shardwright.note", "text": "a sentence"}')
    'a sentence'
    """
    if line.startswith(NOTE):
        # From a process without the variables of a launch, for example on another machine.
        return line.removeprefix(NOTE)
    if not line.startswith(_START):
        return None
    try:
        values = json.loads(line)
        if values.pop("type") == "shardwright.note":
            return str(values["text"])
        return Progress(**values | {"figures": Figures(**values["figures"])})
    except (ValueError, TypeError, KeyError):
        # Another rank wrote into the same line.
        return None


def log_message(message: Message) -> None:
    """Log a message; the record of progress carries it as `progress`, for handlers that draw it."""
    logger.info("%s", message, extra={"progress": message} if isinstance(message, Progress) else None)


def log_progress(what: str, done: int, total: int) -> None:
    """Log the progress of work outside of a training."""
    log_message(Progress(what=what, done=done, total=total))


class _Forwarding(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        progress: Progress | None = getattr(record, "progress", None)
        send(progress or " ".join(record.getMessage().splitlines()))


@contextmanager
def forwarded_logs() -> Iterator[None]:
    """Send what the first rank logs to the process that launched it; other ranks log nothing."""
    package, handler = logging.getLogger(__package__.partition(".")[0]), _Forwarding(logging.INFO)
    level = package.level
    if os.environ.get("RANK", "0") == "0":
        package.addHandler(handler)
        package.setLevel(logging.INFO)
    try:
        yield
    finally:
        package.removeHandler(handler)
        package.setLevel(level)
