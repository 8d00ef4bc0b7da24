"""A process that does not outlive the one that started it, by `PR_SET_PDEATHSIG` of Linux's prctl.

Seen with torch 2.13.0: ranks of a launcher that is killed train on as orphans, and write checkpoints.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

# `PR_SET_PDEATHSIG` of linux/prctl.h.
_SET_PARENT_DEATH_SIGNAL = 1
_LAUNCHED = "TORCHELASTIC_RUN_ID"
"""Which torchrun and accelerate launch set for their ranks. A rank that was started by hand may outlive its shell."""


def signal_at_parent_death(number: signal.Signals) -> Callable[[], object] | None:
    """Return what a process does first to get a signal when its parent dies; `None` where the system cannot do that."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_SET_PARENT_DEATH_SIGNAL, number)


def end_with_launcher() -> None:
    """Let this rank be killed when its launcher dies, which can then neither end it nor notice its end."""
    ask = signal_at_parent_death(signal.SIGKILL) if _LAUNCHED in os.environ else None
    if ask is not None:
        ask()
