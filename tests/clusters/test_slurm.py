"""A plan for two nodes in a real SLURM: the losses of one machine, and a time limit that the run outlives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cluster_hosts import NAMES

from .conftest import asked, read_losses, shardwright, training, until

pytestmark = pytest.mark.clusters


def ended(number: str, config: str) -> str:
    """Return the state of a job that has ended, empty while it has not."""
    told = asked("scontrol", "--oneliner", "show", "job", number, config=config)
    state = next(word.removeprefix("JobState=") for word in told.split() if word.startswith("JobState="))
    return "" if state in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED") else state


def submitted(words: list[str], config: str) -> str:
    done = shardwright(words, SLURM_CONF=config)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[2].rstrip(":")


def test_two_nodes_train_as_one_machine(plan: Path, slurm: str, local_losses: list[float], tmp_path: Path) -> None:
    losses, output = tmp_path / "losses.json", tmp_path / "output"
    words = ["launch", str(plan), "--on", "slurm", f"--sbatch=--output={output}", "--", *training(losses)]
    number = submitted(words, slurm)
    until(lambda: ended(number, slurm), 120, "end of the job", output)
    assert ended(number, slurm) == "COMPLETED", output.read_text()
    assert read_losses(losses) == pytest.approx(local_losses, abs=1e-6)
    assert f"{NAMES[0]}, {NAMES[1]}: same versions and files" in output.read_text()


def test_a_job_at_its_time_limit_saves_and_goes_on_in_its_next_turn(plan: Path, slurm: str, tmp_path: Path) -> None:
    """SIGTERM comes a minute or less after the start; SLURM waits two before the next turn, which is cancelled."""
    losses, output = tmp_path / "losses.json", tmp_path / "output"
    settings = [f"--sbatch=--output={output}", "--sbatch=--time=2", "--sbatch=--signal=TERM@60"]
    words = ["launch", str(plan), "--on", "slurm", *settings, "--no-check-nodes"]
    number = submitted([*words, "--", *training(losses, steps=100_000)], slurm)
    until(lambda: list((plan / "model").glob("checkpoint-*")), 200, "checkpoint before the limit", output)
    first = int(next((plan / "model").glob("checkpoint-*")).name.removeprefix("checkpoint-"))
    until(lambda: output.read_text().count("'loss'") and "resum" in output.read_text(), 300, "second turn", output)
    asked("scancel", number, config=slurm)
    until(lambda: ended(number, slurm), 120, "end of the job")
    assert ended(number, slurm) == "CANCELLED", "a job that its user ends is not queued again"
    state = max((plan / "model").glob("checkpoint-*/trainer_state.json"), key=lambda file: file.stat().st_mtime)
    assert json.loads(state.read_text())["global_step"] >= first


def test_a_cluster_that_is_too_small_is_told_before_anything_is_submitted(
    model: Path, slurm: str, tmp_path: Path
) -> None:
    from .conftest import planned

    done = shardwright(["launch", str(planned(model, tmp_path / "plan", "3x1xCPU")), "--on", "slurm"], SLURM_CONF=slurm)
    assert done.returncode == 2
    assert "the plan has 3 nodes, the cluster 2" in done.stderr
    assert asked("squeue", "--noheader", config=slurm) == ""
