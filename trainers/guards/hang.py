"""A watch on one rank: when it has not moved for long enough, it shows its stacks and ends, and so does its group.

The other ranks wait for the one that stands still, so that all of them stop moving within a step, and each shows where
it is. A rank that was stopped by a signal shows nothing; it is the one whose stacks are missing.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time

_OTHERS_SECONDS = 2.0
"""What the other ranks get to show theirs: a launcher ends them as soon as one rank has ended."""


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
        self.beat("the start of training")

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
        while not self._ended.wait(min(1.0, self._seconds / 4)):
            if time.monotonic() - self._last > self._seconds:
                try:
                    self._show()
                    time.sleep(_OTHERS_SECONDS)
                finally:
                    # A notebook's stderr may have no file to dump stacks to.
                    os._exit(1)

    def _show(self) -> None:
        still = f"rank {self._rank} has not moved for {self._seconds:g} s, since {self._where}"
        print(f"{still}; the stacks of its threads:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        sys.stderr.flush()
