"""Output streams of a job that continue without a reader.

A command that only prints ends when its pipe is closed. One that quantizes or trains still has files to write.
"""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper

PRINTING = frozenset({"check", "explain", "configs", "env", "schema"})
"""Commands that only print; a closed pipe ends them without an error."""


class LastingStream(TextIOWrapper):
    """Text stream that switches to the null device when its pipe is closed."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except BrokenPipeError:
            self._turn_to_null()
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except BrokenPipeError:
            self._turn_to_null()

    def _turn_to_null(self) -> None:
        # The next flush writes the buffer there.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.fileno())
        os.close(null)


def outlast_readers() -> None:
    """Let this process continue when the pipes of its stdout and stderr are closed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, TextIOWrapper):
            names = ("encoding", "errors", "line_buffering", "write_through")
            settings = {key: getattr(stream, key) for key in names}
            setattr(sys, name, LastingStream(stream.detach(), **settings))
