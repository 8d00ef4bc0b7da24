"""Training commands on two machines, which this one stands for: the losses of one with as many ranks."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
from pathlib import Path

import pytest
from training_runs import command, losses_of, make_inputs, trained

pytestmark = [pytest.mark.distributed, pytest.mark.once]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("machines")
    make_inputs(root)
    return root


def on_two_machines(arguments: list[str], directory: Path) -> tuple[subprocess.CompletedProcess[str], ...]:
    place = ["--main-address", "127.0.0.1", "--main-port", str(free_ports()), "--node-rank"]
    running = [
        subprocess.Popen(
            [*arguments, *place, str(rank)], cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in (1, 0)
    ]
    reported = [(process, *process.communicate(timeout=300)) for process in running]
    return tuple(subprocess.CompletedProcess([], process.returncode, *texts) for process, *texts in reported)


def free_ports() -> int:
    """Return a port that is free, as the next one is."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            with contextlib.suppress(OSError):
                second.bind(("127.0.0.1", port + 1))
                return port


def test_two_machines_train_as_one(inputs: Path, tmp_path: Path, deepspeed_cpu_ops: None) -> None:
    """The machines are compared, the first alone reports, and the losses are those of one with as many ranks."""
    expected, shown = trained(inputs, "llama", tmp_path / "one", "--hardware 2xCPU --strategy zero2")
    both = tmp_path / "two"
    words = command(inputs, "llama", both, "--hardware 2x1xCPU --strategy zero2")
    other, first = on_two_machines(words, both)
    assert first.returncode == other.returncode == 0, first.stderr + other.stderr
    assert losses_of(both) == pytest.approx(expected, abs=1e-6)
    assert json.loads(first.stdout)["cross_entropy"] == pytest.approx(shown["cross_entropy"], abs=1e-6)
    assert "same versions and files" in first.stderr
    assert other.stdout == "" and "machine 1 is done; the results are on 127" in other.stderr


def test_machines_with_other_data_are_reported_apart(inputs: Path, tmp_path: Path) -> None:
    """Each has a file of its own under the same name."""
    arguments = command(inputs, "llama", tmp_path, "--hardware 2x1xCPU --strategy ddp")
    place = ["--no-check-nodes", "--main-address", "127.0.0.1", "--main-port", str(free_ports()), "--node-rank"]
    rows, running = (inputs / "rows.jsonl").read_text(), []
    for rank in (1, 0):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "rows.jsonl").write_text(rows.replace("3 and", f"{rank} and"))
        own = [*arguments, "--dataset", str(tmp_path / str(rank) / "rows.jsonl"), *place, str(rank)]
        running.append(subprocess.Popen(own, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    reported = [process.communicate(timeout=120)[1] for process in running]
    assert [process.returncode for process in running] == [2, 2], reported
    assert any("rank 1 on" in text and "differ in: settings, samples" in text for text in reported), reported
    assert not list(tmp_path.glob("out/*.safetensors"))
