"""Work of one rank, for which other ranks wait without exceeding the time limits of collectives."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from threading import Thread
from typing import Any, Generic, Self, TypeVar

from ...ds_configs.specs.errors import InputError, ShardwrightError

_WAIT_SECONDS = 20.0
"""Interval at which a working rank answers the waiting ones."""
_LONGEST_WORK = timedelta(hours=12)
"""How long ranks wait for the first rank; NCCL's default of ten minutes is shorter than a large model's export."""

Result = TypeVar("Result")


class BackgroundTask(Generic[Result]):
    """Work in a thread that stores its result or exception; `None` if this rank has no work."""

    def __init__(self, work: Callable[[], Result] | None, name: str, *, daemon: bool = False) -> None:
        self.name = name
        self._result: Result | None = None
        self._failure: Exception | None = None

        def run() -> None:
            try:
                self._result = work() if work is not None else None
            except Exception as error:
                self._failure = error

        self._thread = Thread(target=run, name=name, daemon=daemon)
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


def is_first_rank() -> bool:
    """Return whether this process is rank 0 or the only one."""
    import torch

    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


class FirstRank:
    """Runs work on the first rank while the others wait for the result, inside a block that every rank must enter."""

    def __init__(self) -> None:
        self._group: Any = None
        self.is_here = is_first_rank()

    def __enter__(self) -> Self:
        import torch

        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            self._group = torch.distributed.new_group(backend="gloo", timeout=_LONGEST_WORK)
        return self

    def __exit__(self, *raised: object) -> None:
        import torch

        if self._group is not None:
            torch.distributed.destroy_process_group(self._group)

    def does(self, work: Callable[[], Any]) -> Any:
        """Run `work` on the first rank and return its result on every rank.

        Raises:
            ShardwrightError: on all ranks if `work` raises; on the other ranks with the text of the error.
        """
        if self._group is None:
            return work()
        import torch

        answer: list[Any] = [None, None]
        failure = None
        if self.is_here:
            try:
                answer[0] = work()
            except Exception as error:
                # Otherwise the other ranks would wait for hours.
                failure = error
                text = str(error) if isinstance(error, ShardwrightError) else repr(error)
                known = isinstance(error, InputError)
                answer[1] = error if known else ShardwrightError(f"the first rank failed: {text}")
        torch.distributed.broadcast_object_list(answer, src=0, group=self._group)
        if failure is not None:
            raise failure
        if answer[1] is not None:
            raise answer[1]
        return answer[0]
