"""The command line that is being run, for reports that say what made them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

_running: ContextVar[str] = ContextVar("command line", default="")


@contextmanager
def running(arguments: Sequence[str]) -> Iterator[None]:
    """Let `command_line` return these arguments of `shardwright` during the block."""
    token = _running.set(shlex.join(["shardwright", *arguments]))
    try:
        yield
    finally:
        _running.reset(token)


def command_line() -> str:
    """Return the command as a shell reads it; empty where a Python program calls."""
    return _running.get()
