"""The command line that is being run, for reports that say what made them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

_running: ContextVar[str] = ContextVar("command line", default="")
_arguments: ContextVar[tuple[str, ...]] = ContextVar("arguments", default=())


@contextmanager
def running(stated: Sequence[str]) -> Iterator[None]:
    """Let `command_line` and `arguments` return these arguments of `shardwright` during the block."""
    token = _running.set(shlex.join(["shardwright", *map(_without_place, stated)]))
    other = _arguments.set(tuple(stated))
    try:
        yield
    finally:
        _running.reset(token)
        _arguments.reset(other)


def command_line() -> str:
    """Return the command as a shell reads it, paths without where they lie; empty where a Python program calls."""
    return _running.get()


def arguments() -> tuple[str, ...]:
    """Return the arguments of `shardwright` as they were stated; none where a Python program calls."""
    return _arguments.get()


def _without_place(argument: str) -> str:
    """Leave out the directories above an absolute path: reports are published beside a model.

    >>> _without_place("--output-dir=/home/me/tuned"), _without_place("/models/tiny/config.json"), _without_place("a/b")
    ('--output-dir=tuned', 'tiny/config.json', 'a/b')
    """
    option, sign, path = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    if not path.startswith(("/", "~")):
        return argument
    place = Path(path)
    return (
        f"{option}{sign}{place.parent.name}/{place.name}" if place.name == "config.json" else option + sign + place.name
    )
