"""Records of checkpoints: missing or damaged files are reported, and the newest complete checkpoint is selected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shardwright.ds_configs.specs.errors import RefusedInputError
from shardwright.trainers import checkpoints
from shardwright.trainers.checkpoints import (
    RECORD,
    NotWholeError,
    flushed_records,
    named_checkpoint,
    newest_whole,
    read_whole,
    rotate,
    set_aside,
    write_record,
)

FILES = {"model.safetensors": b"w" * 1000, "optimizer.pt": b"o" * 3000, "global_step4/rank0.pt": b"z" * 500}


def checkpoint(output_dir: Path, step: int, *, complete: bool = True) -> Path:
    directory = output_dir / f"checkpoint-{step}"
    for name, content in FILES.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
    if complete:
        write_record(directory, step=step, files=flushed_records(directory), facts={"engine": "ddp"})
    return directory


def damage_drop(path: Path) -> None:
    path.unlink()


def damage_truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def damage_grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def damage_flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def damage_replace(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [damage_drop, damage_truncate, damage_grow, damage_flip, damage_replace])
def test_every_damage_of_every_file_is_reported(tmp_path, name, damage):
    directory = checkpoint(tmp_path, 4)
    damage(directory / name)
    with pytest.raises(NotWholeError, match=name):
        read_whole(directory)


@given(st.binary(max_size=200))
@settings(max_examples=60)
def test_record_of_random_bytes_means_an_incomplete_checkpoint(tmp_path_factory, content):
    directory = tmp_path_factory.mktemp("record")
    (directory / RECORD).write_bytes(content)
    with pytest.raises(NotWholeError):
        read_whole(directory)


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "a/../../b"])
def test_record_with_paths_outside_the_checkpoint_is_damaged(tmp_path, name):
    directory = checkpoint(tmp_path, 4)
    content = json.loads((directory / RECORD).read_text())
    content["files"][name] = {"size_bytes": 1, "xxh3_128": "0"}
    (directory / RECORD).write_text(json.dumps(content))
    with pytest.raises(NotWholeError, match="damaged"):
        read_whole(directory)


def test_newest_complete_checkpoint_is_selected_and_skipped_ones_are_listed(tmp_path):
    checkpoint(tmp_path, 2)
    checkpoint(tmp_path, 4)
    checkpoint(tmp_path, 8, complete=False)
    damage_truncate(checkpoint(tmp_path, 10) / "optimizer.pt")
    (tmp_path / "checkpoint-best").mkdir()
    selection = newest_whole(tmp_path)
    assert selection.path.name == "checkpoint-4"
    assert [skipped.split()[0] for skipped in selection.skipped] == ["checkpoint-10", "checkpoint-8"]
    assert "optimizer.pt has 2999 of 3000 bytes" in selection.skipped[0]


def test_every_error_is_reported_if_no_checkpoint_is_complete(tmp_path):
    checkpoint(tmp_path, 2, complete=False)
    damage_drop(checkpoint(tmp_path, 4) / "optimizer.pt")
    with pytest.raises(RefusedInputError) as refused:
        newest_whole(tmp_path)
    assert len(refused.value.errors) == 2
    assert "optimizer.pt is missing" in str(refused.value)
    assert newest_whole(tmp_path / "checkpoint-2") is None
    with pytest.raises(RefusedInputError, match="has no checkpoint_complete"):
        named_checkpoint(tmp_path / "checkpoint-2")


def test_incomplete_and_superseded_checkpoints_are_renamed(tmp_path, monkeypatch):
    notes: list[str] = []
    monkeypatch.setattr(checkpoints, "note_on_first_rank", notes.append)
    checkpoint(tmp_path, 2)
    checkpoint(tmp_path, 4)
    checkpoint(tmp_path, 6)
    for _ in range(2):
        checkpoint(tmp_path, 5, complete=False)
        set_aside(tmp_path, after_step=4)
    names = {path.name for path in tmp_path.iterdir()}
    aside = {"incomplete-checkpoint-5", "incomplete-checkpoint-5-2", "superseded-checkpoint-6"}
    assert names == {"checkpoint-2", "checkpoint-4"} | aside
    assert len(notes) == 3
    assert newest_whole(tmp_path).path.name == "checkpoint-4"


def test_rotation_keeps_two_complete_and_all_incomplete_checkpoints(tmp_path):
    for step in (2, 4, 6, 8):
        checkpoint(tmp_path, step)
    checkpoint(tmp_path, 1, complete=False)
    rotate(tmp_path, limit=None, best=None)
    assert len(list(tmp_path.iterdir())) == 5
    rotate(tmp_path, limit=1, best=str(tmp_path / "checkpoint-2"))
    assert {path.name for path in tmp_path.iterdir()} == {f"checkpoint-{step}" for step in (1, 2, 6, 8)}
