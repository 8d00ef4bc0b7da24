"""Background work of one rank, for which other ranks wait without exceeding the time limits of collectives."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any, Generic, TypeVar

_WAIT_SECONDS = 20.0
"""Interval at which a working rank answers the waiting ones."""

Result = TypeVar("Result")


class BackgroundTask(Generic[Result]):
    """Work in a thread that stores its result or exception; `None` if this rank has no work."""

    def __init__(self, work: Callable[[], Result] | None, name: str) -> None:
        self.name = name
        self._result: Result | None = None
        self._failure: Exception | None = None

        def run() -> None:
            try:
                self._result = work() if work is not None else None
            except Exception as error:
                self._failure = error

        self._thread = Thread(target=run, name=name)
        self._thread.start()

    def ended_everywhere(self, device: Any, *, wait: bool) -> bool:
        """Return whether the work of every rank has ended; with `wait`, wait for it. Every rank must call it."""
        import torch
        import torch.distributed as distributed

        while True:
            has_ended = self.ended(_WAIT_SECONDS if wait else 0)
            if distributed.is_available() and distributed.is_initialized():
                everywhere = torch.tensor(int(has_ended), device=device)
                distributed.all_reduce(everywhere, op=distributed.ReduceOp.MIN)
                has_ended = bool(everywhere.item())
            if has_ended or not wait:
                return has_ended

    def ended(self, seconds: float | None = None) -> bool:
        """Return whether the work has ended, waiting at most some seconds; `None` waits for it."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def result(self) -> Result | None:
        """Return the result of the ended work, or raise its exception."""
        if self._failure is not None:
            raise self._failure
        return self._result
