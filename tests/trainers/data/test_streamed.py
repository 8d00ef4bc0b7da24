"""Samples of a dataset that is read only as far as a training goes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from dataset_hub import NAME, DatasetHub, dataset_hub
from pyarrow import parquet
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.plugins.transformers.training_arguments import byte_tokenizer
from shardwright.trainers.data.samples import load_samples, streamed_samples
from shardwright.trainers.data.sources import DataSettings, parse_source, read_rows

ROWS = {
    "text": [{"text": f"document {index} says hello"} for index in range(5000)],
    "body": [{"body": f"document {index} says hello"} for index in range(5000)],
    "chat": [{"prompt": f"question {index}", "completion": f"answer {index % 7}"} for index in range(5000)],
}


def written(place: Path, rows: list[dict[str, Any]]) -> str:
    place.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(place)


@pytest.mark.parametrize(("kind", "packing"), [("text", True), ("text", False), ("body", True), ("chat", True)])
def test_streamed_samples_are_those_of_the_rows_after_the_head(kind: str, packing: bool, tmp_path: Path) -> None:
    tokenizer, words = byte_tokenizer(512), {"seq_len": 32, "packing": packing}
    column = "body" if kind == "body" else None
    settings = DataSettings(dataset=written(tmp_path / "all.jsonl", ROWS[kind]), text_column=column, **words)
    found = streamed_samples(settings, tokenizer, train_samples=40, evaluation_samples=6)
    assert (len(found.train), len(found.evaluation)) == (40, 6)
    assert found.statistics.rows < 80
    assert found.statistics.train_tokens == sum(len(sample["input_ids"]) for sample in found.train)

    def of_rows(rows: list[dict[str, Any]], name: str) -> Any:
        source = written(tmp_path / name, rows)
        return load_samples(source, tokenizer, evaluation_fraction=0, text_column=column, **words).train

    every = of_rows(ROWS[kind], "every.jsonl")
    assert list(found.evaluation) == every[:6]
    # The head ends with the row of its last sample, whose remainder is trained on by nobody.
    whole = next(count for count in range(6, 80) if len(of_rows(ROWS[kind][:count], "head.jsonl")) >= 6)
    assert list(found.train) == of_rows(ROWS[kind][whole:], "rest.jsonl")[:40]


def test_repeated_rows_of_the_head_are_not_trained_on(tmp_path: Path) -> None:
    rows = [*ROWS["chat"][:4], *ROWS["chat"][:4], {"prompt": "", "completion": ""}, ROWS["chat"][9]]
    settings = DataSettings(dataset=written(tmp_path / "rows.jsonl", rows), seq_len=64)
    found = streamed_samples(settings, byte_tokenizer(512), train_samples=40, evaluation_samples=4)
    assert (len(found.train), found.statistics.rows, found.statistics.empty_rows) == (1, 10, 1)
    place = Path(found.kept.name)
    assert place.is_dir()
    del found
    assert not place.exists()


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_hub_rows_are_downloaded_only_as_far_as_they_are_read(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, words = ROWS["text"], {"seq_len": 32}
    local = streamed_samples(
        DataSettings(dataset=written(tmp_path / "rows.jsonl", rows), **words),
        byte_tokenizer(512),
        train_samples=40,
        evaluation_samples=6,
    )
    # Nobody needs the shards behind the first.
    files = {f"data/train-0000{index}-of-00003.{kind}": _shard(rows, kind) for index in range(3)}
    with dataset_hub(files) as hub, monkeypatch.context() as patch:
        _reach(hub, patch)
        found = streamed_samples(
            DataSettings(dataset=NAME, **words), byte_tokenizer(512), train_samples=40, evaluation_samples=6
        )
    assert list(found.train) == list(local.train) and list(found.evaluation) == list(local.evaluation)
    assert found.statistics.rows == local.statistics.rows
    assert hub.sent.keys() == {f"data/train-00000-of-00003.{kind}"}


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {"notes.py": b"import datasets\n"},
            "needs a script, which would run code of its repository; use the Parquet files",
        ),
        ({"train.jsonl": b'{"text": "a"}\n'}, "Unknown split"),
        ({"README.md": b"# Notes\n"}, "has no data files on the Hub; pass another dataset"),
        (
            {"train.jsonl": b'{"text": "a"}\n', "validation.jsonl": b""},
            "its split validation has no rows; pass another",
        ),
    ],
)
def test_empty_split_and_dataset_code_are_rejected(
    files: dict[str, bytes], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets
    from huggingface_hub import constants

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with dataset_hub(files) as hub, pytest.raises(UsageError, match=said):
        _reach(hub, monkeypatch)
        list(read_rows(parse_source(NAME), split="validation", revision=None))


def _reach(hub: DatasetHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process take a Hub on loopback for the Hub."""
    import datasets
    from huggingface_hub import constants

    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", hub.address)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)


def _shard(rows: list[dict[str, Any]], kind: str) -> bytes:
    if kind == "jsonl":
        return "".join(json.dumps(row) + "\n" for row in rows).encode()
    sink = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
    return sink.getvalue()
