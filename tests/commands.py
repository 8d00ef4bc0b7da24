"""Runs commands of `shardwright`, and the ranks that they launch, in the test's own process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from shardwright.cli.main import run
from shardwright.plugins.launching.launch import Launch
from shardwright.trainers.runs import launch


class Result(NamedTuple):
    """What a command returned and printed."""

    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        return [line.removeprefix("error: ") for line in self.err.splitlines() if line.startswith("error: ")]


Shell = Callable[..., Result]


def shell_in(directory: Path, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    """Return a function that runs one command in a directory, without settings from the environment."""
    for variable in list(os.environ):
        if variable.startswith("SHARDWRIGHT_") and variable != "SHARDWRIGHT_DATA_DIR":
            monkeypatch.delenv(variable)
    monkeypatch.chdir(directory)

    def call(*arguments: object) -> Result:
        capsys.readouterr()
        code = run((name, *map(str, arguments)))
        return Result(code, *capsys.readouterr())

    return call


def run_rank_here(kind: Any, work: Callable[[Any, Path], None], monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """Run the only rank of every launch here instead, and return the commands that would have been launched."""
    commands: list[Sequence[str]] = []

    def run_together(launches: Sequence[Launch], **how: Any) -> None:
        (one,) = launches
        commands.append(one.arguments)
        file = Path(one.arguments[-1])
        work(kind.model_validate_json(file.read_text(encoding="utf-8")), file.parent)

    monkeypatch.setattr(launch, "run_together", run_together)
    return commands
