"""Runs commands of `shardwright` in the test's own process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from shardwright.cli.main import run


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
