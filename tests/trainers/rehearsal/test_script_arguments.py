"""Arguments of a rehearsed script: they name there what they name here, and no output of a training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from shardwright.ds_configs.plan.gallery import gallery_entry, gallery_plan
from shardwright.trainers.rehearsal.script import exchanged_arguments


def test_input_paths_are_absolute_and_outputs_are_in_the_rehearsal_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("model", "plan", "out"):
        (tmp_path / name).mkdir()
    (tmp_path / "notes.txt").write_text("text")
    plan, work = gallery_plan(gallery_entry("gpt2_2xT4")), tmp_path / "work"
    plan = replace(plan, model=replace(plan.model, name=str(tmp_path / "model")))
    given = [
        "model",
        "plan/training_arguments.json",
        "notes.txt",
        "missing.txt",
        "--train_file=notes.txt",
        "--output_dir",
        "out",
        "-x",
        "3",
        "--y=",
    ]
    expected = [
        *(f"{work}/model", f"{work}/training_arguments.json", f"{tmp_path}/notes.txt", "missing.txt"),
        *(f"--train_file={tmp_path}/notes.txt", "--output_dir", "out", "-x", "3", "--y="),
    ]
    assert exchanged_arguments(given, plan, Path("plan"), work) == expected
    assert exchanged_arguments(["org/model", "x" * 300], plan, Path("plan"), work) == ["org/model", "x" * 300]
    named = replace(plan, model=replace(plan.model, name="org/model"))
    assert exchanged_arguments(["--model=org/model"], named, Path("plan"), work) == [f"--model={work}/model"]
