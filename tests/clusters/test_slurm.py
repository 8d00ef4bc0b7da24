"""A plan for two nodes in a real SLURM: the losses of one machine, and a stop that the run outlives."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from cluster_hosts import NAMES

from .conftest import asked, has_steps, planned, read_losses, shardwright, training, until

pytestmark = pytest.mark.clusters


def ended(number: str, config: str) -> str:
    reported = asked("scontrol", "--oneliner", "show", "job", number, config=config)
    state = next(word.removeprefix("JobState=") for word in reported.split() if word.startswith("JobState="))
    return "" if state in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED") else state


def printed(output: Path, text: str, times: int = 1) -> bool:
    return output.exists() and output.read_text().count(text) >= times


def submitted(words: list[str], config: str) -> str:
    done = shardwright(words, SLURM_CONF=config)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[2].rstrip(".")


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """A job that was asked to stop, for which SLURM waits before its next turn."""

    number: str
    out: Path
    output: Path
    saved: tuple[int, ...]
    """Steps of its checkpoints."""


STEPS = 500


@pytest.fixture(scope="module")
def stopped(model: Path, slurm: str, tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """SIGTERM reaches the job's steps as it does before their time limit."""
    work = tmp_path_factory.mktemp("stopped")
    plan, out, output = planned(model, work / "plan", "2x1xCPU"), work / "out", work / "output"
    words = ["launch", str(plan), "--on", "slurm", f"--sbatch=--output={output}", "--no-check-nodes"]
    number = submitted([*words, "--", *training(out, steps=STEPS)], slurm)
    until(partial(has_steps, out), 500, "first steps", output)
    asked("scancel", "--signal=TERM", number, config=slurm)
    until(lambda: "Restarts=1" in asked("scontrol", "show", "job", number, config=slurm), 120, "next turn", output)
    saved = (int(place.name.removeprefix("checkpoint-")) for place in out.glob("checkpoints/checkpoint-*"))
    return Stopped(number=number, out=out, output=output, saved=tuple(saved))


def test_a_stopped_job_saves_and_is_queued_again(stopped: Stopped) -> None:
    assert len(stopped.saved) == 1


@pytest.mark.usefixtures("cold")
def test_two_nodes_train_as_one_machine(plan: Path, slurm: str, local_losses: list[float], tmp_path: Path) -> None:
    """With all imports of all processes, as users start them."""
    out, output = tmp_path / "out", tmp_path / "output"
    words = ["launch", str(plan), "--on", "slurm", f"--sbatch=--output={output}", "--", *training(out)]
    number = submitted(words, slurm)
    until(lambda: ended(number, slurm), 300, "end of the job", output)
    assert ended(number, slurm) == "COMPLETED", output.read_text()
    assert read_losses(out) == pytest.approx(local_losses, abs=1e-6)
    assert f"{NAMES[0]}, {NAMES[1]}: same versions and files" in output.read_text()


def test_a_job_that_its_user_ends_is_not_queued_again(plan: Path, slurm: str, tmp_path: Path) -> None:
    out, output = tmp_path / "out", tmp_path / "output"
    words = ["launch", str(plan), "--on", "slurm", f"--sbatch=--output={output}", "--no-check-nodes"]
    number = submitted([*words, "--", *training(out, steps=100_000)], slurm)
    until(partial(has_steps, out), 500, "first steps", output)
    asked("scancel", number, config=slurm)
    until(lambda: ended(number, slurm), 120, "end of the job", output)
    assert ended(number, slurm) == "CANCELLED"


def test_a_cluster_that_is_too_small_is_reported_before_anything_is_submitted(
    model: Path, slurm: str, stopped: Stopped, tmp_path: Path
) -> None:
    plan = planned(model, tmp_path / "plan", "3x1xCPU", global_batch_size=6)
    words = ["launch", str(plan), "--on", "slurm", "--", *training(tmp_path / "out")]
    done = shardwright(words, SLURM_CONF=slurm)
    assert done.returncode == 2
    assert "the plan has 3 nodes, but the cluster has 2" in done.stderr
    assert asked("squeue", "--noheader", "--format=%i", config=slurm) in ("", stopped.number)


def test_a_job_without_progress_is_not_queued_again(plan: Path, slurm: str, tmp_path: Path) -> None:
    """Two turns in a row are stopped before there is a checkpoint."""
    script, output = tmp_path / "stands_still.py", tmp_path / "output"
    script.write_text("import time\nprint('it stands still', flush=True)\ntime.sleep(600)\n")
    words = ["launch", str(plan), str(script), "--on", "slurm", f"--sbatch=--output={output}", "--no-check-nodes"]
    number = submitted([*words, "--output_dir", str(tmp_path / "checkpoints")], slurm)
    for reported in (2, 4):
        until(partial(printed, output, "it stands still", reported), 200, "both ranks", output)
        asked("scancel", "--signal=TERM", number, config=slurm)
    until(lambda: ended(number, slurm), 120, "end of the job", output)
    assert f"job {number} has no complete checkpoint after 2 runs without progress" in output.read_text()
    assert "Restarts=1 " in asked("scontrol", "show", "job", number, config=slurm)


def test_the_next_turn_of_a_stopped_job_resumes_from_its_checkpoint(stopped: Stopped, slurm: str) -> None:
    """It runs when SLURM's wait is over and no test above has the nodes."""
    until(lambda: ended(stopped.number, slurm), 360, "end of the job", stopped.output)
    assert ended(stopped.number, slurm) == "COMPLETED", stopped.output.read_text()
    assert f"resuming from checkpoint-{stopped.saved[0]}" in stopped.output.read_text()
    assert len(read_losses(stopped.out)) == STEPS
    assert "same versions" not in stopped.output.read_text()
