"""Samples that Accelerate repeats so that every rank gets as many: without a weight, as if they were not there.

Seen with accelerate 1.15.0 (data_loader.py): with `even_batches`, which is the default, the last batches of an epoch
are filled up with its first samples, which the mean over tokens then counts twice: seven samples on two ranks train as
eight. `BatchSamplerShard` repeats samples of a data set, `DataLoaderDispatcher` those of a stream that the first rank
reads for all, `IterableDatasetShard` those of a stream that each rank reads for itself. `gather_for_metrics` leaves
them out of an evaluation; nothing does while a model trains.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

from ..launching.notes import note_on_first_rank

_IGNORED = -100
_LABELS = ("labels", "shift_labels")
_WEIGHED: WeakSet[Any] = WeakSet()
"""Loaders of the trainers that leave repeated samples out."""


def weigh_repeated_samples_zero(trainer: Any) -> None:
    """Take the labels of repeated samples out of the batches that a Trainer trains on; call it once, after it was made.

    Batches whose labels are not token ids row by row, such as documents that a collator has joined, are left as they
    are, with a remark.
    """
    make_loader, collect = trainer.get_train_dataloader, trainer.get_batch_samples
    loaders: list[Any] = []

    def get_train_dataloader() -> Any:
        loaders[:] = [make_loader()]
        _WEIGHED.add(loaders[0])
        if (shard := _stream_of_each_rank(loaders[0])) is not None:
            if loaders[0].num_workers:
                note_on_first_rank("workers read the stream: where its last batch repeats samples, these count twice")
            else:
                shard.dataset = _CountedStream(shard.dataset)
        return loaders[0]

    def get_batch_samples(epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        if loaders:
            epoch_iterator = _without_repeated(epoch_iterator, loaders[0], trainer.accelerator.gradient_state)
        return collect(epoch_iterator, num_batches, device)

    trainer.get_train_dataloader, trainer.get_batch_samples = get_train_dataloader, get_batch_samples


def repeated_samples(loader: Any) -> int:
    """Return how many samples the last batch of each epoch repeats and counts; 0 where they are weighed zero.

    Of streams, whose length nobody knows before their end, 0 too.
    """
    shard = _batch_shard(loader)
    if shard is None or loader in _WEIGHED:
        return 0
    seen, _, rows = _last_of_shard(shard)
    return rows * shard.num_processes - seen if seen else 0


def kept_rows(*, samples: int, rank: int, rows: int) -> int:
    """Return how many rows of a rank's last batch are no repetitions, which stand at the end.

    Args:
        samples: Of all ranks together in that batch.
        rank: Which of the ranks that see different samples this is.
        rows: Of this rank's batch.

    >>> [kept_rows(samples=3, rank=rank, rows=2) for rank in range(3)]
    [2, 1, 0]
    """
    return min(max(samples - rank * rows, 0), rows)


def _without_repeated(batches: Iterator[Any], loader: Any, state: Any) -> Iterator[Any]:
    for batch in batches:
        found = _last_samples(loader, state) if state.end_of_dataloader else None
        yield batch if found is None else _masked(batch, *found)


def _last_samples(loader: Any, state: Any) -> tuple[int, int, int] | None:
    """Return samples of the last batch of all ranks, this rank among them, and the rows that each has.

    `None` where nothing is repeated, or nothing is known of it.
    """
    from accelerate.data_loader import DataLoaderDispatcher

    if isinstance(loader, DataLoaderDispatcher):
        ranks, seen = loader.state.num_processes, state.remainder
        return None if loader._drop_last or seen < 0 else (seen, loader.state.process_index, -(-seen // ranks))
    if (stream := _stream_of_each_rank(loader)) is not None:
        rows = stream.batch_size // stream.num_processes if stream.split_batches else stream.batch_size
        count = stream.dataset.count if isinstance(stream.dataset, _CountedStream) else 0
        seen = count % (rows * stream.num_processes)
        return (seen, stream.process_index, rows) if seen else None
    shard = _batch_shard(loader)
    found = _last_of_shard(shard) if shard is not None else (0, 0, 0)
    return found if found[0] else None


def _batch_shard(loader: Any) -> Any:
    """Return the sampler that repeats samples of a data set; `None` where none does."""
    from accelerate.data_loader import BatchSamplerShard

    samplers = (getattr(loader, name, None) for name in ("batch_sampler", "sampler"))
    shard = next((one for one in samplers if isinstance(one, BatchSamplerShard)), None)
    if shard is None or shard.drop_last or not shard.even_batches or not shard.batch_size:
        return None
    return shard if hasattr(shard.batch_sampler, "sampler") else None


def _last_of_shard(shard: Any) -> tuple[int, int, int]:
    rows = shard.batch_size // shard.num_processes if shard.split_batches else shard.batch_size
    return len(shard.batch_sampler.sampler) % (rows * shard.num_processes), shard.process_index, rows


def _stream_of_each_rank(loader: Any) -> Any:
    """Return the part of a stream that a rank reads for itself; `None` for others, or without repetitions."""
    from accelerate.data_loader import DataLoaderDispatcher, IterableDatasetShard

    if isinstance(loader, DataLoaderDispatcher) or not isinstance(loader.dataset, IterableDatasetShard):
        return None
    return None if loader.dataset.drop_last else loader.dataset


class _CountedStream:
    """A stream that counts its samples while it is read; in all else what it wraps."""

    def __init__(self, samples: Any) -> None:
        self.samples, self.count = samples, 0

    def __iter__(self) -> Iterator[Any]:
        self.count = 0
        for sample in self.samples:
            self.count += 1
            yield sample

    def __len__(self) -> int:
        return len(self.samples)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.samples, name)


def _masked(batch: Any, samples: int, rank: int, rows: int) -> Any:
    import torch

    kept = kept_rows(samples=samples, rank=rank, rows=rows)
    if kept == rows:
        return batch
    found = {name: batch[name] for name in _LABELS if torch.is_tensor(batch.get(name))}
    if not found or any(len(one) != rows or one.is_floating_point() for one in found.values()):
        note_on_first_rank("the last batch of an epoch repeats samples, which count twice: its labels are not known")
        return batch
    changed = {name: one.clone() for name, one in found.items()}
    for one in changed.values():
        one[kept:] = _IGNORED
    return {**batch, **changed}
