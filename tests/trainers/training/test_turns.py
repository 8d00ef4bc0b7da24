"""Turns of a run that SLURM queues again: one that gets no further twice is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from shardwright.cli.main import run
from shardwright.trainers.checkpoints import write_record


def checkpoint(output: Path, step: int, *, whole: bool = True) -> None:
    directory = output / f"checkpoint-{step}"
    directory.mkdir(parents=True)
    if whole:
        write_record(directory, step=step, files={}, facts={})


@pytest.fixture
def turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Function that ends a turn of a job, and returns the exit code and what was said."""

    def ended(*behind: str, job: str = "7") -> tuple[int, str]:
        monkeypatch.setenv("SLURM_JOB_ID", job)
        code = run(["launch", str(tmp_path), "--turn-ended", "--", *behind])
        return code, capsys.readouterr().err

    return ended


def test_two_turns_without_a_new_complete_checkpoint_end_the_job(turn, tmp_path: Path) -> None:
    arguments = ("--output-dir", str(tmp_path / "out"))
    assert turn(*arguments) == (0, "")
    checkpoint(tmp_path / "out" / "checkpoints", 20, whole=False)
    code, said = turn(*arguments, "--resume-or-anew")
    assert code == 1
    assert "job 7 has no complete checkpoint after 2 runs without progress and is not queued again" in said
    assert len(said.strip().splitlines()) == 1


def test_a_run_with_progress_resets_the_count(turn, tmp_path: Path) -> None:
    output = tmp_path / "elsewhere"
    arguments = ("--output-dir", str(output), "--resume-or-anew")
    assert turn(*arguments)[0] == 0
    checkpoint(output / "checkpoints", 10)
    assert turn(*arguments)[0] == 0
    assert turn(*arguments)[0] == 0
    assert turn(*arguments, job="8")[0] == 0, "another job"
    checkpoint(output / "checkpoints", 30)
    assert turn(*arguments, job="8")[0] == 0
    assert turn(*arguments, job="8")[0] == 0
    code, said = turn(*arguments, job="8")
    assert (code, "is still at step 30" in said) == (1, True)
