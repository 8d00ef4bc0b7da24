"""Decisions that all ranks share: one works and the others hear of it, or each does its part and all fail together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ...ds_configs.specs.errors import ShardwrightError
from ...plugins.transformers.finite_weights import gathered

Result = TypeVar("Result")


def on_first_rank(work: Callable[[], Result]) -> Result:
    """Return what the first rank found, or raise its error, on every rank; every rank must call it."""
    import torch.distributed as distributed

    several = distributed.is_available() and distributed.is_initialized()
    answer: list[Any] = [None, None]
    if not several or distributed.get_rank() == 0:
        try:
            answer = [work(), None]
        except ShardwrightError as error:
            answer = [None, error]
    if several:
        distributed.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise answer[1]
    found: Result = answer[0]
    return found


def together(work: Callable[[], Result] | None, what: str) -> Result | None:
    """Do this rank's part, if it has one, and fail on every rank when one of them fails.

    Raises:
        ShardwrightError: says which rank failed, and why.
    """
    failure: Exception | None = None
    result: Result | None = None
    try:
        if work is not None:
            result = work()
    except (OSError, ShardwrightError) as error:
        failure = error
    told = gathered(None if failure is None else f"{what}: {failure}")
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(told) if text is not None]
    if failed:
        raise ShardwrightError("; ".join(failed)) from failure
    return result
