"""Output streams of a job: when their reader leaves, the job goes on without them.

A command that only prints has nothing left to do then; one that quantizes or trains still has its files to write.
"""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper

PRINTING = frozenset({"check", "explain", "configs", "env", "schema"})
"""Commands whose whole result is what they print; a closed pipe ends them, and that is no failure."""


class LastingStream(TextIOWrapper):
    """A text stream that turns to the null device when its pipe is closed."""

    def write(self, text: str) -> int:
        """Write, or forget what nobody reads."""
        try:
            return super().write(text)
        except BrokenPipeError:
            self._turn_to_null()
            return len(text)

    def flush(self) -> None:
        """Flush, or forget what nobody reads."""
        try:
            super().flush()
        except BrokenPipeError:
            self._turn_to_null()

    def _turn_to_null(self) -> None:
        # What the buffer still holds goes there with the next flush.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.fileno())
        os.close(null)


def outlast_readers() -> None:
    """Let this process go on when the readers of its stdout and stderr leave."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, TextIOWrapper):
            kept = {each: getattr(stream, each) for each in ("encoding", "errors", "line_buffering", "write_through")}
            setattr(sys, name, LastingStream(stream.detach(), **kept))
