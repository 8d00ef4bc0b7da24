"""A rehearsed script runs in a copy: what is copied, and what its arguments name there."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from shardwright.ds_configs.plan.gallery import gallery_entry, gallery_plan
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.trainers.rehearsal import rehearse
from shardwright.trainers.rehearsal.rehearse import copy_directory, exchanged_arguments


@pytest.fixture
def here(tmp_path: Path) -> Path:
    here = tmp_path / "here"
    for name in ("data/a.jsonl", "plan/plan.json", ".git/config", "env/pyvenv.cfg", "model/model.bin", "out/x.pt"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(name)
    (here / "work").mkdir()
    (tmp_path / "apart").mkdir()
    (tmp_path / "apart" / "b.jsonl").write_text("b")
    for link, target in {"linked": tmp_path / "apart", "loop": tmp_path, "dangling": tmp_path / "none"}.items():
        (here / link).symlink_to(target)
    os.mkfifo(here / "pipe")
    return here


def test_the_copy_has_the_files_and_what_replaces_some(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = tmp_path / "small"
    (small / "model").mkdir(parents=True)
    (small / "plan.json").write_text("small")
    (small / "model" / "config.json").write_text("small")
    exchanged = {here / "plan" / "plan.json": small / "plan.json", here / "model": small / "model"}
    monkeypatch.setattr(rehearse, "_LARGEST_WEIGHTS_BYTES", 3)
    copy = tmp_path / "copy"
    copy_directory(here, copy, exchanged, apart=here / "work")
    files = {str(path.relative_to(copy)): path.read_text() for path in copy.rglob("*") if path.is_file()}
    assert files == {
        "data/a.jsonl": "data/a.jsonl",
        "linked/b.jsonl": "b",
        "plan/plan.json": "small",
        "model/config.json": "small",
    }
    for path in copy.rglob("*"):
        assert not path.is_symlink()
        if path.is_file():
            path.write_text("changed")
    assert (here / "data" / "a.jsonl").read_text() == "data/a.jsonl"
    assert (tmp_path / "apart" / "b.jsonl").read_text() == "b"


@pytest.mark.parametrize("limit", ["MOST_FILES", "MOST_BYTES"])
def test_a_directory_that_is_too_large_is_rejected(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(rehearse, limit, 1)
    with pytest.raises(UsageError, match="start in a directory with the script's files"):
        copy_directory(here, tmp_path / "copy", {}, apart=here / "work")


def test_arguments_name_the_copy_and_what_is_not_copied(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(here)
    work = tmp_path / "work"
    work.mkdir()
    copies = {here: work / "copy"}
    copy_directory(here, work / "copy", {}, apart=here / "work")
    plan = gallery_plan(gallery_entry("gpt2_2xT4"))
    plan = replace(plan, model=replace(plan.model, name=str(here / "model")))
    apart = tmp_path / "apart" / "b.jsonl"
    expected = {
        "model": f"{work}/model",
        "plan/training_arguments.json": f"{work}/training_arguments.json",
        "data/a.jsonl": f"{work}/copy/data/a.jsonl",
        "--train_file=data/a.jsonl": f"--train_file={work}/copy/data/a.jsonl",
        f"{here}/new": f"{work}/copy/new",
        ".git/config": f"{here}/.git/config",
        "../apart/b.jsonl": str(apart),
        str(apart): str(apart),
        "--output_dir=../apart": "--output_dir=../apart",
        "--output_dir=.git": f"--output_dir={work}/copy/.git",
        f"--output_dir={here}/.git": f"--output_dir={work}/copy/.git",
        "--output_dir=out": f"--output_dir={work}/copy/out",
        "missing.txt": "missing.txt",
        "--y=": "--y=",
        "x" * 300: "x" * 300,
    }
    for argument, value in expected.items():
        assert exchanged_arguments([argument], plan, Path("plan"), work, copies) == [value]
        flag, sign, rest = argument.partition("=")
        if sign:
            words = [flag, value.removeprefix(f"{flag}=")]
            assert exchanged_arguments([flag, rest], plan, Path("plan"), work, copies) == words
    hub = replace(plan, model=replace(plan.model, name="org/model"))
    assert exchanged_arguments(["--model=org/model"], hub, Path("plan"), work, {}) == [f"--model={work}/model"]
