"""Settings of Ray Train for a plan, plans that a cluster cannot run, and a launcher that ends with its worker."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml
from planning import public_model
from shardwright.cli.main import run
from shardwright.ds_configs.plan.plan import Plan, make_plan
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.plugins.clusters import ray_train

DATA = ["--", "--dataset", "python-help", "--output-dir", "out"]
NODE = """
import pathlib, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("READY", flush=True)
reported = sys.stdin.read()
pathlib.Path(sys.argv[1]).write_text(reported)
"""
STARTER = """
import sys
from shardwright.plugins.launching.launch import Launch, launch_ranks
launch = Launch(program=(sys.executable,), arguments=("-c", *sys.argv[1:]), ends_with_starter=True)
launch_ranks(launch, timeout_seconds=60, on_line=lambda line: print(line, flush=True))
"""


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    model, job = public_model("meta-llama--Llama-3.1-8B"), TrainingJob(strategy="zero3")
    make_plan(model, parse_hardware("2x8xA100-80GB"), job).write(tmp_path / "plan")
    return tmp_path / "plan"


def test_a_dry_run_prints_what_ray_train_gets(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["launch", str(plan), "--on", "ray", "--dry-run", "--restarts", "3", *DATA]) == 0
    reported = yaml.safe_load(capsys.readouterr().out)
    assert reported["scaling_config"] == {
        "num_workers": 2,
        "use_gpu": True,
        "resources_per_worker": {"CPU": 8.0, "GPU": 8.0},
        "placement_strategy": "STRICT_SPREAD",
    }
    assert reported["failure_config"] == {"max_failures": 3, "controller_failure_limit": 3}
    from ray import train

    assert train.ScalingConfig(**reported["scaling_config"]).total_resources == {"CPU": 16.0, "GPU": 16.0}
    assert train.FailureConfig(**reported["failure_config"]).max_failures == 3
    assert reported["worker"][-5:] == DATA
    assert run(["launch", str(plan), "--on", "ray", "--dry-run", "--restarts", "3", "--min-nodes", "1", *DATA]) == 0
    reported = yaml.safe_load(capsys.readouterr().out)
    scaling = train.ScalingConfig(
        **reported["scaling_config"] | {"num_workers": tuple(reported["scaling_config"]["num_workers"])}
    )
    assert (scaling.min_workers, scaling.max_workers) == (1, 2)
    assert reported["failure_config"] == {"max_failures": 3, "controller_failure_limit": 6}


@pytest.mark.parametrize(
    ("nodes", "least", "said"),
    [
        ([8, 8], 2, None),
        ([8, 16], 1, "min_nodes = 1: requires nodes with 8 CPU and 8 GPU, but one has twice as much"),
        ([8, 16], 2, None),
        ([8, 12], 1, None),
        ([8], 1, "the plan has 2 nodes with 8 CPU and 8 GPU each, but the cluster has 1"),
    ],
)
def test_nodes_are_counted_before_anything_is_submitted(
    plan: Path, monkeypatch: pytest.MonkeyPatch, nodes: list[int], least: int, said: str | None
) -> None:
    import ray

    there = [{"Alive": True, "Resources": {"CPU": count, "GPU": count}} for count in nodes]
    monkeypatch.setattr(ray, "nodes", lambda: there)
    found = ray_train.ray_node_errors(Plan.load(plan), least=least)
    assert [str(said) in str(error) for error in found] == [True] * (said is not None)


def test_an_address_that_is_none(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        closed = f"127.0.0.1:{taken.getsockname()[1]}"
    for address, said in ((closed, "no cluster answers there"), ("ray://head:10001", "must have the form HOST:PORT")):
        assert (
            run(
                [
                    "launch",
                    str(plan),
                    "--on",
                    "ray",
                    "--address",
                    address,
                    "--",
                    "--dataset",
                    "python-help",
                    "--output-dir",
                    "out",
                ]
            )
            == 2
        )
        error = capsys.readouterr().err
        assert said in error
        assert len(error.strip().splitlines()) == 1


def test_without_ray(plan: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert run(["launch", str(plan), "--on", "ray", *DATA]) == 2
    assert "requires the package ray; pip install 'shardwright[ray]'" in capsys.readouterr().err


def test_a_launch_that_was_rejected_is_not_tried_again() -> None:
    turns = ray_train._Attempts()
    assert turns.begin() == 0
    turns.failed("node 1: rank 3 was killed", 1)
    assert turns.begin() == 1
    turns.failed("node 0: no such flag", 2)
    turns.failed("node 1: a peer has gone", 1)
    assert turns.begin() == ray_train._ENDED
    assert turns.failure() == ("node 0: no such flag", 2)


def test_a_launcher_is_reported_to_end_with_the_worker_that_started_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STARTER, NODE, str(tmp_path / "reported")]
    starter = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    assert starter.stdout.readline() == "READY\n"
    (node,) = psutil.Process(starter.pid).children()
    starter.kill()
    starter.wait()
    psutil.wait_procs([node], timeout=20)
    assert (tmp_path / "reported").read_text() == "end\n"
