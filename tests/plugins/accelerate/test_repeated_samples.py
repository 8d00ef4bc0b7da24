"""Samples that Accelerate repeats at the end of an epoch: each counts once on all ranks together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.state import GradientState
from shardwright.plugins.accelerate.repeated_samples import repeated_samples, weigh_repeated_samples_zero
from torch.utils.data import DataLoader, IterableDataset

RANKS = 2


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    def __init__(self, rows: list[dict[str, torch.Tensor]]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


def rank_loader(samples: int, rank: int, *, streams: bool, drop_last: bool = False, split: bool = False) -> Any:
    rows = [{"labels": torch.tensor([index, index])} for index in range(samples)]
    own: Any = Stream(rows) if streams else rows
    loader: Any = DataLoader(own, batch_size=4 if split else 2, drop_last=drop_last)
    settings: dict[str, Any] = {"dispatch_batches": False, "put_on_device": False, "split_batches": split}
    return prepare_data_loader(loader, num_processes=RANKS, process_index=rank, **settings)


def labels_of_an_epoch(make: Any, epochs: int = 1) -> list[int]:
    trainer = SimpleNamespace(
        get_train_dataloader=make,
        get_batch_samples=lambda batches, count, device: list(batches),
        accelerator=SimpleNamespace(gradient_state=GradientState()),
    )
    weigh_repeated_samples_zero(trainer)
    loader = trainer.get_train_dataloader()
    for _ in range(epochs):
        batches = trainer.get_batch_samples(iter(loader), 0, None)
    return [label for batch in batches for label in batch["labels"][:, 0].tolist() if label >= 0]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("samples", [1, 3, 7, 8, 9])
def test_every_sample_counts_once(samples: int, streams: bool, split: bool) -> None:
    seen = [
        labels_of_an_epoch(lambda rank=rank: rank_loader(samples, rank, streams=streams, split=split), epochs=2)
        for rank in range(RANKS)
    ]
    assert sorted(label for labels in seen for label in labels) == list(range(samples))


def test_without_weights_a_data_set_says_how_many_it_repeats() -> None:
    assert [repeated_samples(rank_loader(count, 1, streams=False)) for count in (7, 8, 9)] == [1, 0, 3]
    assert repeated_samples(rank_loader(7, 1, streams=False, drop_last=True)) == 0
    assert repeated_samples(rank_loader(7, 1, streams=True)) == 0
