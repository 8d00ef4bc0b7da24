"""Samples that are divided among machines."""

from __future__ import annotations

from itertools import chain

import pytest
from accelerate.data_loader import BatchSamplerShard
from hypothesis import given
from hypothesis import strategies as st
from shardwright.trainers.data.samples import DividedSamples
from torch.utils.data import BatchSampler, SequentialSampler

counts = st.integers(1, 4)


@given(machines=counts, ranks=counts, batch_size=counts, turns=counts)
def test_ranks_of_a_machine_read_its_samples_once(machines: int, ranks: int, batch_size: int, turns: int) -> None:
    """Under Accelerate's own division of batches, in their order."""
    count = machines * ranks * batch_size * turns
    for machine in range(machines):
        own = list(range(count // machines))
        divided = DividedSamples(
            own_samples=own,
            machine=machine,
            machines=machines,
            ranks_per_machine=ranks,
            batch_size=batch_size,
            count=count,
        )
        batches = [
            BatchSamplerShard(
                BatchSampler(SequentialSampler(divided), batch_size, drop_last=False),
                num_processes=machines * ranks,
                process_index=machine * ranks + rank,
            )
            for rank in range(ranks)
        ]
        read = [[divided[index] for index in batch] for turn in zip(*batches, strict=True) for batch in turn]
        assert list(chain.from_iterable(read)) == own


def test_too_few_samples_repeat_and_samples_of_other_machines_raise() -> None:
    divided = DividedSamples(
        own_samples=["a", "b", "c"], machine=1, machines=2, ranks_per_machine=1, batch_size=2, count=12
    )
    assert len(divided) == 12
    assert [divided[index] for index in (2, 3, 6, 7, 10, 11)] == ["a", "b", "c", "a", "b", "c"]
    with pytest.raises(IndexError, match="sample 4 is on machine 0, and this is machine 1"):
        divided[4]
    with pytest.raises(IndexError, match="sample 12 of 12"):
        divided[12]
