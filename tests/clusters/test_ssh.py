"""A plan for two machines over ssh: the losses of one machine, a host that dies, and a run that is asked to stop."""

from __future__ import annotations

import json
import signal
from functools import partial
from pathlib import Path

import pytest
from cluster_hosts import NAMES, Hosts

from .conftest import has_steps, read_losses, saved, saving, shardwright, start, started, training, until

pytestmark = pytest.mark.clusters


def test_two_machines_train_as_one(model: Path, over_ssh: list[str], tmp_path: Path) -> None:
    """`train` with its report, beside the losses of one machine with as many ranks."""
    (tmp_path / "text.txt").write_text("\n\n".join(f"Line {index} says {index * index}." for index in range(300)))
    words = ["train", str(model), "--dataset", str(tmp_path / "text.txt"), "--strategy", "zero2", "--precision", "fp32"]
    words += ["--seq-len", "32", "--global-batch-size", "8", "--max-steps", "10", "--logging-steps", "1"]
    found = []
    for name, more in (("one", ["--hardware", "2xCPU"]), ("two", ["--hardware", "2x1xCPU", *over_ssh])):
        done = shardwright([*words, "--output-dir", str(tmp_path / name), *more])
        assert done.returncode == 0, done.stdout + done.stderr
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        found.append([json.loads(line)["loss"] for line in lines])
    assert f"{NAMES[0]}, {NAMES[1]}: same versions and files" in done.stderr
    assert found[1] == pytest.approx(found[0], abs=1e-6)


def test_a_stopped_run_saves_on_both_machines(plan: Path, over_ssh: list[str], tmp_path: Path) -> None:
    out, output = tmp_path / "out", tmp_path / "output"
    words = ["launch", str(plan), *over_ssh, "--no-check-nodes", "--"]
    running = started([*words, *training(out, steps=100_000)], output)
    until(partial(has_steps, out), 200, "first steps", output)
    running.send_signal(signal.SIGTERM)
    assert running.wait(timeout=120) == 128 + signal.SIGTERM, output.read_text()
    assert len(list(out.glob("checkpoints/*/checkpoint_complete.json"))) == 1
    done = shardwright(["check", str(plan)])
    assert done.returncode == 0, done.stderr


def test_a_host_without_a_way_to_it_is_reported_before_anything_starts(
    plan: Path, over_ssh: list[str], tmp_path: Path
) -> None:
    (tmp_path / "hostfile").write_text(f"{NAMES[0]} slots=1\n10.83.7.77 slots=1\n")
    options = [*over_ssh[:3], str(tmp_path / "hostfile"), *over_ssh[4:]]
    done = shardwright(["launch", str(plan), *options, "--", *training(tmp_path / "out")])
    assert done.returncode == 1
    assert "10.83.7.77: no answer over ssh" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_the_command_repeated_after_a_host_died_resumes(
    plan: Path, over_ssh: list[str], hosts: Hosts, local_losses: list[float], tmp_path: Path
) -> None:
    """The second host loses its power behind the first checkpoint and comes back."""
    out, output = tmp_path / "out", tmp_path / "output"
    words = ["launch", str(plan), *over_ssh, "--no-check-nodes", "--", *saving(out)]
    running = started(words, output)
    until(saved(out, 20).exists, 200, "checkpoint", output)
    hosts.kill(NAMES[1])
    assert running.wait(timeout=120) != 0
    start(hosts, NAMES[1])
    done = shardwright([*words, "--resume-or-anew"])
    assert done.returncode == 0, done.stderr
    assert "resuming from checkpoint-" in done.stdout + done.stderr
    assert read_losses(out) == pytest.approx(local_losses, abs=1e-6)
