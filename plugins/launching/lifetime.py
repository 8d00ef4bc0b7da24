"""End processes with the one that started them, on this machine and on others.

Seen with torch 2.13.0: ranks of a killed launcher continue to train as orphans and write checkpoints. On Linux
`PR_SET_PDEATHSIG` of prctl ends them. A launcher on another machine only has its standard input: a signal to `ssh` ends
the connection but not the remote process. The remote process therefore reads its standard input. At its end it stops as
after SIGTERM, so that ranks save a checkpoint; after the word "end" it stops immediately.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

# `PR_SET_PDEATHSIG` of linux/prctl.h.
_SET_PARENT_DEATH_SIGNAL = 1


def signal_at_parent_death(number: signal.Signals) -> Callable[[], object] | None:
    """Return a function that makes a process get a signal when its parent dies; `None` on unsupported systems."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_SET_PARENT_DEATH_SIGNAL, number)


_END = b"end\n"
_STANDARD_INPUT = 0
_SECONDS_TO_END = 10.0
"""Time for the other machine to kill its ranks, which occupy accelerator memory."""
_SECONDS_BETWEEN_SIGNALS = 0.5


def tell_to_end(launcher: subprocess.Popen[bytes]) -> None:
    """Make a launcher on another machine kill its ranks, and wait some seconds for it."""
    assert launcher.stdin is not None, "its standard input is a pipe"
    with contextlib.suppress(OSError, ValueError):
        launcher.stdin.write(_END)
        launcher.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        launcher.wait(timeout=_SECONDS_TO_END)


def stop_with_stdin() -> None:
    """Stop this process when its standard input, the connection that started it, ends."""

    def read_to_end() -> None:
        # Unbuffered: a thread that holds the lock of a buffer keeps Python from exiting.
        received = b""
        while chunk := os.read(_STANDARD_INPUT, 4096):
            received += chunk
        os.kill(os.getpid(), signal.SIGTERM)
        if _END in received:
            # After the first signal ranks save a checkpoint; the second one stops that.
            time.sleep(_SECONDS_BETWEEN_SIGNALS)
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=read_to_end, daemon=True, name="standard input").start()
