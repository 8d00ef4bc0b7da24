"""Files of tensors and model directories appear whole or not at all, whenever the writer is stopped."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from shardwright.plugins.safetensors import (
    INDEX,
    SINGLE,
    appearing_directory,
    load_tensors,
    name_shards,
    read_checkpoint,
    rename_tensors,
    save_checkpoint,
    save_tensors,
)

TENSORS = {f"layer.{index}": torch.full((4, 8), float(index)) for index in range(6)}


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_checkpoint_in_one_or_several_files(tmp_path):
    save_checkpoint(TENSORS, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [SINGLE]
    assert (tmp_path / SINGLE).stat().st_mode & 0o777 == 0o644
    many = tmp_path / "many"
    many.mkdir()
    save_checkpoint(TENSORS, many, stem="small", shard_bytes=300)
    found = read_checkpoint(many, index="small.safetensors.index.json", single="small.safetensors")
    assert found.keys() == TENSORS.keys() and len({tensor.file for tensor in found.values()}) == 3


def test_tensors_that_share_memory_are_stored_apart(tmp_path):
    whole = torch.arange(12.0).reshape(3, 4)
    save_tensors({"whole": whole, "again": whole, "row": whole[1], "turned": whole.t()}, tmp_path / "x.safetensors")
    found = load_tensors(tmp_path / "x.safetensors")
    assert torch.equal(found["again"], whole) and torch.equal(found["row"], whole[1])
    assert torch.equal(found["turned"], whole.t())


def test_shards_get_their_names_and_index(tmp_path):
    files = [tmp_path / "one", tmp_path / "two"]
    save_tensors({"a": torch.ones(3)}, files[0])
    save_tensors({"b": torch.ones(2, dtype=torch.bfloat16)}, files[1])
    name_shards(files)
    stated = json.loads((tmp_path / INDEX).read_text())
    assert stated["metadata"] == {"total_parameters": 5, "total_size": 16}
    assert list(read_checkpoint(tmp_path)) == ["a", "b"]


def test_renaming_changes_headers_and_index_alone(tmp_path):
    save_checkpoint(TENSORS, tmp_path, shard_bytes=300)
    assert rename_tensors(tmp_path, lambda name: name.replace("layer.1", "first")) == 1
    found = read_checkpoint(tmp_path)
    assert set(found) == {"first", *TENSORS} - {"layer.1"}
    assert torch.equal(load_tensors(found["first"].file)["first"], TENSORS["layer.1"])
    before = contents(tmp_path)
    assert rename_tensors(tmp_path, lambda name: name) == 0 and contents(tmp_path) == before


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, name):
    save_tensors(TENSORS, tmp_path / SINGLE)
    before = contents(tmp_path)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os if name == "fsync" else Path, name, full)
    with pytest.raises(OSError, match="No space left on device"):
        save_tensors({"other": torch.ones(2)}, tmp_path / SINGLE)
    assert contents(tmp_path) == before


def test_a_directory_is_complete_or_absent(tmp_path):
    with pytest.raises(ZeroDivisionError), appearing_directory(tmp_path / "out") as place:
        save_checkpoint(TENSORS, place)
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())
    with appearing_directory(tmp_path / "new" / "out") as place:
        save_checkpoint(TENSORS, place)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"]
    assert (tmp_path / "new" / "out").stat().st_mode & 0o777 == 0o755


def test_stopped_before_each_file_there_is_never_a_mixture(tmp_path, monkeypatch):
    """Two files take the place of one, while the writer is killed before each move in turn."""
    output, real = tmp_path / "out", Path.replace
    output.mkdir()
    for last in range(4):
        save_checkpoint({"old": torch.ones(2)}, output)
        (output / "notes.txt").write_text("mine")
        moved: list[str] = []

        def killed(path, target, moved=moved, last=last):
            if Path(target).parent == output:
                if len(moved) == last:
                    raise KeyboardInterrupt
                moved.append(path.name)
            return real(path, target)

        with pytest.raises(KeyboardInterrupt), appearing_directory(output) as place:
            save_checkpoint(TENSORS, place, shard_bytes=500)
            (place / "config.json").write_text("{}")
            monkeypatch.setattr(Path, "replace", killed)
        monkeypatch.undo()
        assert not (output / INDEX).exists() and not (output / SINGLE).exists()
        assert (output / "notes.txt").exists() and [path.name for path in tmp_path.iterdir()] == ["out"]
    with appearing_directory(output) as place:
        save_checkpoint(TENSORS, place, shard_bytes=500)
    assert read_checkpoint(output).keys() == TENSORS.keys()
