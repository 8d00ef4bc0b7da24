"""Options of machines that have an effect, those that have none, and names that a scheduler does not accept."""

from __future__ import annotations

from pathlib import Path

import pytest
from planning import public_model
from shardwright.cli.main import run
from shardwright.ds_configs.plan.plan import make_plan
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.plugins import clusters


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


def test_all_machines_meet_at_the_stated_port(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(public_model("Qwen/Qwen2.5-0.5B"), parse_hardware("2x8xA100-80GB"), TrainingJob(strategy="zero3"))
    plan.write(tmp_path / "plan")
    (tmp_path / "hosts").write_text("host-a\nhost-b\n")
    (tmp_path / "script.py").write_text("import transformers\n\ntransformers.Trainer()\n")
    monkeypatch.chdir(tmp_path)
    words = ["launch", "--on", "ssh", "--hostfile", "hosts", "--main-port", "12345", "plan", "script.py"]
    assert run([*words[:1], "--dry-run", *words[1:]]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "host-" in line]
    assert len(lines) == 2 and all("--main-port 12345" in line for line in lines)
    ports = []
    monkeypatch.setattr(clusters, "run_over_ssh", lambda *_, port, **__: ports.append(port))
    assert run(words) == 0 and ports == [12345]
