"""A watch on one rank: when it has not moved for long enough, it shows its stacks and ends, and so does its group.

The other ranks wait for the one that stands still, so that all of them stop moving within a step, and each shows where
it is. A rank that was stopped by a signal shows nothing; it is the one whose stacks are missing, and no launcher could
end it but by SIGKILL, for which torchrun 2.13.0 waits as long as for a checkpoint.

`watched` is for the whole life of a rank. In a training steps tell that it moves; while it loads, evaluates or writes,
nothing does so in time, and a rank that uses its processor counts as one that moves.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

_OTHERS_SECONDS = 2.0
"""What the other ranks get to show theirs: a launcher ends them as soon as one rank has ended."""


_BUSY_SHARE = 0.02
"""Share of a processor above which a rank does something; the polling of communication libraries takes less."""
_of_rank: HangWatch | None = None


@contextmanager
def watched(seconds: float | None) -> Iterator[None]:
    """Watch this rank during the block; `None` leaves it alone."""
    global _of_rank
    if seconds is None:
        yield
        return
    _of_rank = HangWatch(seconds, int(os.environ.get("RANK", "0")))
    _of_rank.start()
    try:
        yield
    finally:
        _of_rank.end()
        _of_rank = None


def watch_of_rank() -> HangWatch | None:
    """Return the watch that `watched` began."""
    return _of_rank


class HangWatch:
    """Ends the process when `beat` was not called for some seconds.

    Args:
        seconds: How long a rank may stand still.
        rank: Its number, to be shown.
    """

    def __init__(self, seconds: float, rank: int) -> None:
        self._seconds, self._rank = seconds, rank
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._in_steps = False
        self._busy = time.process_time()
        self.beat("its start")

    def in_steps(self, on: bool, where: str) -> None:
        """Let `beat` alone count from now on, or work of the processor as well."""
        self.beat(where)
        self._in_steps = on

    def beat(self, where: str) -> None:
        """Note that the rank has moved, and where it is."""
        self._last, self._where = time.monotonic(), where

    def start(self) -> None:
        """Begin to watch."""
        self._thread = threading.Thread(target=self._watch, name="hang-watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Watch no longer."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        pause = min(1.0, self._seconds / 4)
        while not self._ended.wait(pause):
            before, self._busy = self._busy, time.process_time()
            if not self._in_steps and self._busy - before > _BUSY_SHARE * pause:
                self._last = time.monotonic()
            if time.monotonic() - self._last > self._seconds:
                try:
                    self._show()
                    _end_stopped_ranks()
                    time.sleep(_OTHERS_SECONDS)
                finally:
                    # A notebook's stderr may have no file to dump stacks to.
                    os._exit(1)

    def _show(self) -> None:
        still = f"rank {self._rank} has not moved for {self._seconds:g} s, since {self._where}"
        print(f"{still}; the stacks of its threads:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        sys.stderr.flush()


def _end_stopped_ranks() -> None:
    """Kill ranks of this launch that a signal has stopped."""
    launcher = psutil.Process().parent() if "TORCHELASTIC_RUN_ID" in os.environ else None
    for process in [] if launcher is None else launcher.children():
        with contextlib.suppress(psutil.Error):
            if process.status() == psutil.STATUS_STOPPED:
                print(f"process {process.pid} is stopped by a signal, and killed", file=sys.stderr, flush=True)
                process.kill()
