"""Runs commands of `shardwright`, and the ranks that they launch, in the test's own process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from shardwright.cli.main import run
from shardwright.plugins.launching.launch import Launch
from shardwright.trainers.rank_main import read_task


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        return [line.removeprefix("error: ") for line in self.err.splitlines() if line.startswith("error: ")]


Shell = Callable[..., Result]


def shell_in(directory: Path, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    """Return a function that runs one command in a directory, without settings from the environment."""
    monkeypatch.chdir(directory)
    return partial(every_command(capsys, monkeypatch), name)


def every_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    """Return a function that runs the command that its first argument names, without settings from the environment."""
    for variable in list(os.environ):
        if variable.startswith("SHARDWRIGHT_") and variable != "SHARDWRIGHT_DATA_DIR":
            monkeypatch.delenv(variable)

    def call(*arguments: object) -> Result:
        capsys.readouterr()
        code = run(tuple(map(str, arguments)))
        return Result(code, *capsys.readouterr())

    return call


def run_rank_here(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """Run the only rank of every launch here instead, and return the commands that would have been launched."""
    commands: list[Sequence[str]] = []

    def launch_ranks(launch: Launch, **_: Any) -> None:
        commands.append(launch.arguments)
        file = Path(launch.arguments[-1])
        read_task(file).run(file.parent)

    monkeypatch.setattr("shardwright.trainers.runs.run.launch_ranks", launch_ranks)
    return commands
