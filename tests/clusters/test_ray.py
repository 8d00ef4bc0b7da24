"""The example for Ray on a cluster of two nodes: the losses of one machine, and a node that dies and is replaced."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_hosts import environment

from .conftest import read_losses, saved, saving, training, until

pytestmark = pytest.mark.clusters

EXAMPLE = Path(__file__).parents[2] / "examples" / "clusters" / "ray_train.py"
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args=NODE | {"include_dashboard": False})
    made.add_node(**NODE)
    made.wait_for_nodes()
    yield made
    made.shutdown()


def started(cluster: Any, words: list[str], output: Path, **variables: str) -> subprocess.Popen[str]:
    variables |= {"RAY_ADDRESS": cluster.address, "RAY_DEDUP_LOGS": "0", "RAY_CHDIR_TO_TRIAL_DIR": "0"}
    with output.open("w") as written:
        return subprocess.Popen(
            [sys.executable, str(EXAMPLE), *words],
            stdout=written,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(**variables, PATH=os.environ["PATH"]),
        )


def test_two_nodes_train_as_one_machine(plan: Path, cluster: Any, local_losses: list[float], tmp_path: Path) -> None:
    out, output = tmp_path / "out", tmp_path / "output"
    assert started(cluster, [str(plan), *training(out)], output).wait(timeout=400) == 0, output.read_text()
    assert read_losses(out) == pytest.approx(local_losses, abs=1e-6)
    assert "same versions and files" in output.read_text()


def test_a_node_that_dies_is_replaced_and_the_run_resumes(
    plan: Path, cluster: Any, local_losses: list[float], tmp_path: Path
) -> None:
    out, output = tmp_path / "out", tmp_path / "output"
    running = started(cluster, [str(plan), *saving(out)], output, RESTARTS="2")
    until(saved(out, 20).exists, 500, "checkpoint", output)
    cluster.remove_node(next(node for node in cluster.list_all_nodes() if not node.is_head()), allow_graceful=False)
    cluster.add_node(**NODE)
    assert running.wait(timeout=400) == 0, output.read_text()
    assert "resuming from checkpoint-" in output.read_text()
    assert read_losses(out) == pytest.approx(local_losses, abs=1e-6)
