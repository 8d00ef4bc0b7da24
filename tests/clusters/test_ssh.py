"""A plan for two machines over ssh: the losses of one machine, a host that dies, and a run that is asked to stop."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import pytest
from cluster_hosts import NAMES, Hosts

from .conftest import has_steps, read_losses, saved, saving, shardwright, start, started, training, until

pytestmark = pytest.mark.clusters


def test_two_machines_train_as_one(plan: Path, over_ssh: list[str], local_losses: list[float], tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = shardwright(["launch", str(plan), *over_ssh, "--", *training(out)])
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{NAMES[0]}, {NAMES[1]}: same versions and files" in done.stdout + done.stderr
    assert read_losses(out) == pytest.approx(local_losses, abs=1e-6)


def test_a_stopped_run_saves_on_both_machines(plan: Path, over_ssh: list[str], tmp_path: Path) -> None:
    out, output = tmp_path / "out", tmp_path / "output"
    words = ["launch", str(plan), *over_ssh, "--no-check-nodes", "--"]
    running = started([*words, *training(out, steps=100_000)], output)
    until(partial(has_steps, out), 500, "first steps", output)
    running.send_signal(signal.SIGTERM)
    assert running.wait(timeout=120) == 128 + signal.SIGTERM, output.read_text()
    assert len(list(out.glob("checkpoints/*/checkpoint_complete.json"))) == 1
    done = shardwright(["check", str(plan)])
    assert done.returncode == 0, done.stderr


def test_the_command_repeated_after_a_host_died_resumes(
    plan: Path, over_ssh: list[str], hosts: Hosts, local_losses: list[float], tmp_path: Path
) -> None:
    """The second host loses its power behind the first checkpoint and comes back."""
    out, output = tmp_path / "out", tmp_path / "output"
    words = ["launch", str(plan), *over_ssh, "--no-check-nodes", "--", *saving(out)]
    running = started(words, output)
    until(saved(out, 20).exists, 500, "checkpoint", output)
    hosts.kill(NAMES[1])
    assert running.wait(timeout=120) != 0
    start(hosts, NAMES[1])
    done = shardwright([*words, "--resume-or-anew"])
    assert done.returncode == 0, done.stderr
    assert "resuming from checkpoint-" in done.stdout + done.stderr
    assert read_losses(out) == pytest.approx(local_losses, abs=1e-6)
