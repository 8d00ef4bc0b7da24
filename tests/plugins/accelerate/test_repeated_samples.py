"""Samples that Accelerate repeats at the end of an epoch: each counts once on all ranks together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.state import GradientState
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.plugins.accelerate import (
    RepeatedSamples,
    SamplesOnce,
    gathered_once,
    hide_files,
    let_ranks_read_streams,
    trained_rows,
)
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


def trained_batches(loader: Any, epochs: int = 1) -> list[Any]:
    trainer: Any = SimpleNamespace(accelerator=SimpleNamespace(gradient_state=GradientState()))
    repeated = RepeatedSamples()
    repeated.follow(loader)
    return [list(repeated.unlabelled(trainer, iter(loader))) for _ in range(epochs)][-1]


def labels_of_an_epoch(loader: Any, epochs: int = 1) -> list[int]:
    batches = trained_batches(loader, epochs)
    return [label for batch in batches for label in batch["labels"][:, 0].tolist() if label >= 0]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("samples", [1, 3, 7, 8, 9])
def test_every_sample_counts_once(samples: int, streams: bool, split: bool) -> None:
    seen = [
        labels_of_an_epoch(rank_loader(samples, rank, streams=streams, split=split), epochs=2) for rank in range(RANKS)
    ]
    assert sorted(label for labels in seen for label in labels) == list(range(samples))


def test_accelerate_repeats_samples_of_an_evaluation() -> None:
    """Fails when Accelerate repeats none (seen in 1.15.0); `SamplesOnce` can go."""
    loaders = [rank_loader(7, rank, streams=False) for rank in range(RANKS)]
    assert sum(len(batch["labels"]) for loader in loaders for batch in loader) == 8


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("samples", [1, 2, 3, 4, 6, 7, 8, 9])
def test_an_evaluation_reads_every_sample_once_in_order(samples: int, streams: bool, split: bool) -> None:
    ranks = [list(evaluated(samples, rank, streams=streams, split=split)) for rank in range(RANKS)]
    assert len({len(steps) for steps in ranks}) == 1
    order = []
    for steps in zip(*ranks, strict=True):
        # What Accelerate gathers has as many rows of every rank.
        assert len({len(batch["labels"]) for batch, _, _ in steps}) == 1
        gathered = [index for batch, _, _ in steps for index in batch["index"].tolist()]
        remainder = steps[0][2]
        order += gathered[:remainder] if remainder > 0 else gathered
        counted = [label for batch, _, _ in steps for label in batch["labels"][:, 0].tolist() if label >= 0]
        assert sum(
            step.samples if step.samples is not None else len(batch["labels"]) for batch, step, _ in steps
        ) == len(counted)
    assert order == list(range(samples))


def evaluated(samples: int, rank: int, *, streams: bool, split: bool) -> Any:
    """Yield what a rank evaluates: the batch, what counts of it, and the remainder that Accelerate knows."""
    state = GradientState()
    loader = rank_loader(samples, rank, streams=streams, split=split)
    once = SamplesOnce(loader, state)
    for batch in loader:
        step = once.step({**batch, "index": batch["labels"][:, 0]})
        yield step.batch, step, loader.remainder if state.end_of_dataloader else -1


def test_numbers_that_are_predicted_keep_their_values_and_count_nothing() -> None:
    loader = rank_loader(3, 1, streams=False)
    once = SamplesOnce(loader, GradientState())
    steps = [once.step({**batch, "labels": batch["labels"].float()}) for batch in loader]
    assert [step.samples for step in steps] == [None, 0]
    assert steps[-1].batch["labels"].tolist() == [[2.0, 2.0]]


def test_a_training_knows_the_rows_of_its_last_batch() -> None:
    for rank, expected in enumerate([[None, None], [None, 1]]):
        loader = rank_loader(7, rank, streams=False)
        batches = trained_batches(loader)
        assert [trained_rows(batch) for batch in batches] in (expected, [None, 2])


@pytest.mark.parametrize(("is_last", "expected"), [(False, [0, 1, 10, 11]), (True, [0, 1, 10])])
def test_metrics_get_the_samples_of_one_rank_of_each_group(
    is_last: bool, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_gather(parts: list[torch.Tensor], own: torch.Tensor, group: Any) -> None:
        for rank, part in enumerate(parts):
            part.copy_(own + 10 * rank)

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: {"data": 2}[group])
    monkeypatch.setattr(torch.distributed, "all_gather", all_gather)
    accelerator: Any = Accelerator(cpu=True)
    last = SimpleNamespace(end_of_dataloader=is_last, remainder=3)
    monkeypatch.setattr(accelerator, "gradient_state", last)
    with gathered_once(accelerator, lambda: "data"):
        both = accelerator.gather_for_metrics({"logits": torch.tensor([0, 1]), "labels": torch.tensor([[0], [1]])})
        assert accelerator.gather(torch.tensor(0)).tolist() == [0, 10]
    assert both["logits"].tolist() == both["labels"].flatten().tolist() == expected


@pytest.mark.parametrize(("samples", "max_steps", "is_rejected"), [(7, 2, True), (7, 1, False), (8, 2, False)])
def test_repeated_samples_without_labels_are_rejected_if_training_reaches_them(
    samples: int, max_steps: int, is_rejected: bool
) -> None:
    loader = rank_loader(samples, 0, streams=False)
    args, state = SimpleNamespace(gradient_accumulation_steps=1), SimpleNamespace(max_steps=max_steps)
    accelerator = SimpleNamespace(gradient_state=GradientState())
    repeated, trainer = RepeatedSamples(), SimpleNamespace(accelerator=accelerator, args=args, state=state)
    repeated.follow(loader)
    batches = repeated.unlabelled(trainer, ({"pairs": batch["labels"]} for batch in loader))  # type: ignore[arg-type]
    if is_rejected:
        with pytest.raises(UsageError, match="leave 3 for the last batch of 4"):
            next(batches)
    else:
        assert next(batches)["pairs"].tolist() == [[0, 0], [1, 1]]


def files_of(files: int, rows: int = 11) -> Any:
    """Return a stream of numbers in several files of different lengths."""
    from datasets import IterableDataset as HubStream

    bounds = [rows * index // files + (index % 2 if 0 < index < files else 0) for index in range(files + 1)]

    def generate(parts: list[int]) -> Any:
        for part in parts:
            yield from ({"labels": [row, row]} for row in range(bounds[part], bounds[part + 1]))

    return HubStream.from_generator(generate, gen_kwargs={"parts": list(range(files))}).with_format("torch")


def loaded(stream: Any, rank: int) -> list[list[int]]:
    loader: Any = DataLoader(stream, batch_size=2)
    loader = prepare_data_loader(
        loader, num_processes=RANKS, process_index=rank, dispatch_batches=False, put_on_device=False
    )
    return [batch["labels"][:, 0].tolist() for batch in loader]


def test_accelerate_still_gives_ranks_whole_files() -> None:
    assert loaded(files_of(2), 0)[:2] != loaded(files_of(1), 0)[:2]


@pytest.mark.parametrize("files", [1, 2, 3, 5])
@pytest.mark.parametrize("shuffled", [False, True])
def test_ranks_read_the_rows_of_a_stream_of_files_as_one_process(files: int, shuffled: bool) -> None:
    trainer = SimpleNamespace(
        args=SimpleNamespace(
            world_size=RANKS, dataloader_num_workers=0, accelerator_config=SimpleNamespace(dispatch_batches=None)
        ),
        train_dataset=files_of(files),
        accelerator=SimpleNamespace(dataloader_config=SimpleNamespace(dispatch_batches=None)),
    )
    let_ranks_read_streams(trainer)
    assert trainer.reads_streams

    def stream() -> Any:
        return files_of(files).shuffle(seed=1, buffer_size=4) if shuffled else files_of(files)

    def read(rank: int) -> list[list[int]]:
        own = stream()
        hide_files(own)
        return loaded(own, rank)

    ranks = [read(rank) for rank in range(RANKS)]
    order = [row["labels"][0].item() for row in stream()]
    steps = list(zip(*ranks, strict=True))
    assert [row for step in steps for batch in step for row in batch][: len(order)] == order
