"""Stages of a pipeline together: sums over all of them, and files that they write one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..deepspeed.engine_layers import stages_of

if TYPE_CHECKING:
    from torch import Tensor


class StageGroup:
    """The ranks that hold the other stages of a model, none where a rank holds the whole one.

    Args:
        model: What is trained, a pipeline's module or not.
        should_save: Whether this rank writes files where there are no stages.
    """

    def __init__(self, model: Any, *, should_save: bool = True) -> None:
        self._pipeline: Any = stages_of(model)
        self._should_save = should_save

    @property
    def writes(self) -> bool:
        """Whether this is the rank that writes what its stages hold."""
        if self._pipeline is None:
            return self._should_save
        return bool(self._pipeline.data_parallel_rank == 0 and self._pipeline.tensor_parallel_rank == 0)

    def add_up(self, counts: Tensor) -> Tensor:
        """Return counts added up over all stages; every rank must call it."""
        if self._pipeline is None:
            return counts
        import torch.distributed as dist

        device = next(self._pipeline.parameters()).device
        summed = counts.to(device)
        dist.all_reduce(summed, group=self._pipeline._grid.get_pipe_parallel_group())
        return summed.to(counts.device)

    def in_turn(self, work: Callable[[], None]) -> None:
        """Let the writing rank of each stage work while the others wait; every rank must call it."""
        if self._pipeline is None:
            if self._should_save:
                work()
            return
        import torch.distributed as dist

        for stage in range(self._pipeline._grid.pipe_parallel_size):
            if self.writes and stage == self._pipeline.stage_id:
                work()
            dist.barrier()
