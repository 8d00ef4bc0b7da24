"""Rows of datasets of the Hub."""

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
from shardwright.trainers.data.sources import parse_source, read_rows


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_limited_number_of_rows_downloads_no_more_than_these(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": f"document {index} says hello"} for index in range(5000)]
    files = {f"data/train-0000{index}-of-00003.{kind}": _shard(rows, kind) for index in range(3)}
    with dataset_hub(files) as hub:
        _reach(hub, monkeypatch)
        assert list(read_rows(parse_source(f"{NAME}#40"), split="train", revision=None)) == rows[:40]
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
