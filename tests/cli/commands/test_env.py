"""`shardwright env`: options of earlier versions."""

from __future__ import annotations

import pytest
from shardwright.cli.main import run


def test_env_create_names_its_replacement(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["env", "create", "quantize"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "create" in line and "python -m venv" in line and "shardwright[quantize]" in line
