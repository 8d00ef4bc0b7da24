"""View of a working directory: everything is read through it, and no write reaches the user's files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from shardwright.ds_configs.specs.errors import ShardwrightError
from shardwright.trainers.rehearsal import view as viewing
from shardwright.trainers.rehearsal.view import ViewGuard, make_view


@pytest.fixture
def here(tmp_path: Path) -> Path:
    place = tmp_path / "here"
    for name in ("data/a.jsonl", "plan/plan.json", ".git/config", "env/pyvenv.cfg", "out/model.safetensors"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(name)
    return place


def test_files_are_shown_and_some_exchanged(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small, work = tmp_path / "small.json", here / "work"
    small.write_text("small")
    work.mkdir()
    assert make_view(here, tmp_path / "view", {here / "plan" / "plan.json": small}, apart=work)
    shown = {
        str(path.relative_to(tmp_path / "view")): path.read_text()
        for path in (tmp_path / "view").rglob("*")
        if path.is_file()
    }
    assert shown == {
        "data/a.jsonl": "data/a.jsonl",
        "plan/plan.json": "small",
        "out/model.safetensors": "out/model.safetensors",
    }
    # What a library writes without Python's knowing is a copy.
    (tmp_path / "view" / "out" / "model.safetensors").write_text("trained")
    assert (here / "out" / "model.safetensors").read_text() == "out/model.safetensors"

    monkeypatch.setattr(viewing, "MOST_FILES", 1)
    monkeypatch.setattr(viewing, "LARGEST_COPY_BYTES", 3)
    assert not make_view(here, tmp_path / "less", {}, apart=work)
    assert not (tmp_path / "less" / "out" / "model.safetensors").exists()


def test_writes_land_in_the_view_or_are_rejected(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    view = tmp_path / "view"
    make_view(here, view, {}, apart=tmp_path / "work")
    monkeypatch.chdir(view)
    monkeypatch.setattr(viewing.tempfile, "gettempdir", lambda: "/elsewhere")
    guard = ViewGuard.of(view, here, free=view)

    def opened(path: Path | str, flags: int) -> None:
        guard("open", (str(path), "w", flags))

    opened("data/a.jsonl", os.O_RDONLY)
    assert Path("data/a.jsonl").is_symlink()
    # Appending continues the user's file.
    opened("data/a.jsonl", os.O_WRONLY | os.O_APPEND)
    with Path("data/a.jsonl").open("a") as stream:
        stream.write(" more")
    opened("plan/plan.json", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    assert not Path("plan/plan.json").exists()
    assert (Path("data/a.jsonl").read_text(), (here / "data/a.jsonl").read_text()) == (
        "data/a.jsonl more",
        "data/a.jsonl",
    )
    assert (here / "plan/plan.json").read_text() == "plan/plan.json"
    opened("new/file", os.O_WRONLY | os.O_CREAT)
    opened(here / ".cache" / "x", os.O_WRONLY | os.O_CREAT)
    opened(3, os.O_WRONLY)  # type: ignore[arg-type]
    guard("os.remove", ("data/a.jsonl", -1))
    for event, arguments in {
        "open": (str(here / "result.json"), "w", os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        "os.mkdir": (str(here / "out2"), 0o777, -1),
        "os.rename": ("new", str(here / "data" / "a.jsonl"), -1, -1),
        "os.remove": (str(here / "data" / "a.jsonl"), -1),
    }.items():
        with pytest.raises(ShardwrightError, match="must not change your files"):
            guard(event, arguments)
