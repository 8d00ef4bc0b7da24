"""Samples that are divided among machines, each of which holds its own part of them on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .samples import Sample


@dataclass(frozen=True, kw_only=True, slots=True)
class DividedSamples:
    """Samples of a training on several machines, of which this machine has those that its own ranks are given.

    Ranks are given whole batches in turn (`BatchSamplerShard` of Accelerate), of samples in their order: batch `b` of
    all is that of rank `b mod world_size`, and ranks of a machine have numbers one after another. The batches of this
    machine are its own samples from first to last, and from the first again where it has too few.

    >>> sizes = {"machines": 2, "ranks_per_machine": 1, "batch_size": 2, "count": 8}
    >>> first = DividedSamples(own_samples=list("abcd"), machine=0, **sizes)
    >>> [first[index] for index in (0, 1, 4, 5)]
    ['a', 'b', 'c', 'd']
    """

    own_samples: Sequence[Sample]
    """Those on this machine."""
    machine: int
    """Its number, from 0."""
    machines: int
    """How many there are."""
    ranks_per_machine: int
    """Ranks of each."""
    batch_size: int
    """Samples that one rank is given at a time."""
    count: int
    """Samples of the training, on all machines."""

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        """Return the sample of that place in the training.

        Raises:
            IndexError: the training has no such place, or another machine has its sample.
        """
        if not 0 <= index < self.count:
            raise IndexError(f"sample {index} of {self.count}")
        batch, place = divmod(index, self.batch_size)
        turn, rank = divmod(batch, self.machines * self.ranks_per_machine)
        machine, rank_here = divmod(rank, self.ranks_per_machine)
        if machine != self.machine:
            raise IndexError(f"sample {index} is on machine {machine}, and this is machine {self.machine}")
        own = (turn * self.ranks_per_machine + rank_here) * self.batch_size + place
        return self.own_samples[own % len(self.own_samples)]
