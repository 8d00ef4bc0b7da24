"""Work of one rank in a thread of its own, for which the others wait without running into the limits of collectives."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any, Generic, TypeVar

_WAIT_SECONDS = 20.0
"""Between two words of a rank that works to those that wait for it."""

Result = TypeVar("Result")


class Beside(Generic[Result]):
    """Work in a thread, whose result or failure is kept for whoever asks.

    Args:
        work: What is to be done; `None` where this rank has no part in it.
        name: What the work is about, also the name of the thread.
    """

    def __init__(self, work: Callable[[], Result] | None, name: str) -> None:
        self.name = name
        self._work = work
        self._result: Result | None = None
        self._failure: Exception | None = None
        self._thread = Thread(target=self._run, name=name)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._work() if self._work is not None else None
        except Exception as error:
            self._failure = error

    def ended_everywhere(self, device: Any, *, wait: bool) -> bool:
        """Tell whether the work of every rank is over, and wait until it is where asked; every rank must call it."""
        while not all_ranks(self.ended(_WAIT_SECONDS if wait else 0), device):
            if not wait:
                return False
        return True

    def ended(self, seconds: float | None = None) -> bool:
        """Tell whether the work is over, after some seconds at the latest; `None` waits for it."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def result(self) -> Result | None:
        """Return what the work returned, or raise what it failed with, once it is over."""
        if self._failure is not None:
            raise self._failure
        return self._result


def all_ranks(mine: bool, device: Any) -> bool:
    """Tell whether something holds on every rank, at the cost of one small all-reduce; every rank must call it."""
    import torch
    import torch.distributed as distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return mine
    told = torch.tensor(int(mine), device=device)
    distributed.all_reduce(told, op=distributed.ReduceOp.MIN)
    return bool(told.item())
