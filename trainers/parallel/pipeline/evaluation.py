"""The samples of an evaluation that each replica of a pipeline counts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from ....ds_configs.specs.errors import UsageError
from .micro_batches import IGNORED, sampled_batch_faults

if TYPE_CHECKING:
    import torch


def own_samples(
    batches: Iterable[Mapping[str, torch.Tensor]], *, samples: int | None, replicas: int, replica: int
) -> Iterator[tuple[dict[str, torch.Tensor], bool]]:
    """Yield the batches of a replica without labels of repeated samples, and whether each is the last.

    Accelerate starts again from the first sample where the last batches of some replica would stay empty. In turn `r`
    replica `i` holds the samples `(r * replicas + i) * B` to `(r * replicas + i + 1) * B`, of which those beyond the
    data set are repeated.

    Args:
        batches: Batches of B samples, as Accelerate shards them.
        samples: Samples of the whole data set; `None` when unknown, and then nothing is repeated.
        replicas: How many share the data set.
        replica: Which one this is.

    Raises:
        UsageError: a batch lacks something, or holds what stages cannot pass on.

    >>> import torch
    >>> ids = torch.tensor([[1, 2], [3, 4]])
    >>> batch = {"input_ids": ids, "labels": ids}
    >>> [kept["labels"].tolist() for kept, _ in own_samples([batch], samples=3, replicas=2, replica=1)]
    [[[1, 2], [-100, -100]]]
    """
    held: dict[str, torch.Tensor] | None = None
    rows: int | None = None
    for turn, batch in enumerate(batches):
        if held is not None:
            yield held, False
        if faults := sampled_batch_faults(batch):
            raise UsageError(faults)
        held = dict(batch)
        size = len(held["labels"])
        rows = rows or size
        if samples is not None:
            kept = max(0, samples - (turn * replicas + replica) * rows)
            if kept < size:
                held["labels"] = held["labels"].clone()
                held["labels"][kept:] = IGNORED
    if held is not None:
        yield held, True
