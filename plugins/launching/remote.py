"""Both ends of a launcher on another machine, which the one that started it reaches by its standard input alone.

A signal to `ssh` ends the connection and leaves what runs behind it. The other end therefore reads its standard input:
where that ends it stops as by SIGTERM, so that ranks save what they have, and at once where it was told to end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time

_END = b"end\n"
_STANDARD_INPUT = 0
_SECONDS_TO_END = 10.0
"""What the other machine gets to kill its ranks, which hold its accelerators' memory."""
_SECONDS_BETWEEN_SIGNALS = 0.5


def tell_to_end(launcher: subprocess.Popen[bytes]) -> None:
    """Let a launcher on another machine kill its ranks, and wait some seconds for it."""
    assert launcher.stdin is not None, "its standard input is a pipe"
    with contextlib.suppress(OSError, ValueError):
        launcher.stdin.write(_END)
        launcher.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        launcher.wait(timeout=_SECONDS_TO_END)


def tell_to_end_later(launcher: subprocess.Popen[bytes]) -> None:
    """Let a launcher kill its ranks as soon as its standard input ends, which it does with this process."""
    assert launcher.stdin is not None, "its standard input is a pipe"
    with contextlib.suppress(OSError):
        launcher.stdin.write(_END)
        launcher.stdin.flush()


def stop_with_stdin() -> None:
    """Let this process stop once its standard input ends, which it does with the connection that started it."""
    threading.Thread(target=_follow, daemon=True, name="standard input").start()


def _follow() -> None:
    # Unbuffered: a thread that holds the lock of a buffer keeps Python from ending.
    told = b""
    while chunk := os.read(_STANDARD_INPUT, 4096):
        told += chunk
    os.kill(os.getpid(), signal.SIGTERM)
    if _END in told:
        # The first lets ranks save; the second ends that.
        time.sleep(_SECONDS_BETWEEN_SIGNALS)
        os.kill(os.getpid(), signal.SIGTERM)
