"""A request to stop: the first SIGTERM or SIGINT is noted, a second one ends the process at once.

Seen with torch 2.13.0: a launcher that is asked to stop passes the signal on to its ranks and kills them 30 s later;
SLURM signals launcher and ranks alike. What comes within `SAME_REQUEST_SECONDS` of the first is therefore the same
request.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

from ...ds_configs.specs.errors import ShardwrightError

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAME_REQUEST_SECONDS = 2.0


class StoppedBySignalError(ShardwrightError):
    """A run that ended early because a rank or its launcher was asked to; `exit_code` is the signal's."""

    def __init__(self, message: str, *, number: int) -> None:
        super().__init__(message)
        self.number = number
        self.exit_code = 128 + number

    def __reduce__(self) -> tuple[Any, ...]:
        return _stopped, (str(self), self.number)


def _stopped(message: str, number: int) -> StoppedBySignalError:
    return StoppedBySignalError(message, number=number)


class StopRequest:
    """Notes the first signal of this process between `install` and `remove`.

    Args:
        seconds: How long the process may go on after it; then it ends, saved or not.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._received = 0.0
        self._before: dict[int, Any] = {}
        self._limit: threading.Timer | None = None
        self._process = 0
        self.number = 0
        """The signal; 0 while there is none."""

    def install(self) -> None:
        """Take the signals over; nothing outside the main thread, where Python allows no handler."""
        if threading.current_thread() is threading.main_thread() and not self._before:
            self._process, self.number = os.getpid(), 0
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}

    def remove(self) -> None:
        """Give the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
        if self._limit is not None:
            self._limit.cancel()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A worker of a data loader, forked from the rank.
            os._exit(128 + number)
        if not self.number:
            self.number, self._received = number, time.monotonic()
            self._limit = threading.Timer(self._seconds, os._exit, (128 + number,))
            self._limit.daemon = True
            self._limit.start()
        elif time.monotonic() - self._received > SAME_REQUEST_SECONDS:
            os._exit(128 + number)
