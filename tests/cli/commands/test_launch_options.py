"""Options of machines without effect on an engine, and names that a scheduler does not accept."""

from __future__ import annotations

from pathlib import Path

import pytest
from shardwright.cli.main import run


@pytest.mark.parametrize("command", ["train", "distill", "qat"])
@pytest.mark.parametrize("words", [["--on", "slurm"], ["--hostfile", "h"], ["--sbatch=--time=1"]])
def test_training_commands_name_launch_for_several_machines(
    command: str, words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run([command, "model", "model", "--output-dir", str(tmp_path / "out"), *words]) == 2
    assert "shardwright launch PLAN --on ssh|slurm; or start each machine with --node-rank" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--on", "slurm", "--hostfile", "h"], "hostfile = 'h': is for --on ssh, not slurm"),
        (["--main-address", "a"], "main_address = 'a': needs --node-rank"),
        (["--on", "ssh", "--node-rank", "1", "--main-address", "a"], "is for --on local, not ssh"),
        (["--node-rank", "1"], "node_rank = 1: needs --main-address"),
        (["--on", "slurm", "--name", "a\n#SBATCH --wrap=x"], "must be at most 40 lower-case letters"),
        (["--on", "slurm", "--dry-run", "--sbatch=--time=1\n#SBATCH --uid=0"], "must have the form --NAME=VALUE"),
    ],
)
def test_an_option_without_effect_is_rejected(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["launch", "plan", *words]) == 2
    assert said in capsys.readouterr().err
