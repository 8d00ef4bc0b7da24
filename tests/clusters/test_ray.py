"""A plan for two nodes on a Ray cluster: the losses of one machine, and a node that dies and is replaced."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import planned, read_losses, saved, saving, shardwright, started, training, until

pytestmark = pytest.mark.clusters

NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args=NODE | {"include_dashboard": False})
    made.add_node(**NODE)
    made.wait_for_nodes()
    yield made
    made.shutdown()


def test_two_nodes_train_as_one_machine(plan: Path, cluster: Any, local_losses: list[float], tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["launch", str(plan), "--on", "ray", "--address", cluster.address, "--", *training(out)]
    done = shardwright(words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert read_losses(out) == pytest.approx(local_losses, abs=1e-6)
    assert "same versions and files" in done.stdout + done.stderr


def test_a_node_that_dies_is_replaced_and_the_run_resumes(
    plan: Path, cluster: Any, local_losses: list[float], tmp_path: Path
) -> None:
    out, output = tmp_path / "out", tmp_path / "output"
    words = ["launch", str(plan), "--on", "ray", "--address", cluster.address, "--no-check-nodes", "--restarts", "1"]
    running = started([*words, "--", *saving(out)], output)
    until(saved(out, 20).exists, 200, "checkpoint", output)
    cluster.remove_node(next(node for node in cluster.list_all_nodes() if not node.is_head()), allow_graceful=False)
    cluster.add_node(**NODE)
    assert running.wait(timeout=300) == 0, output.read_text()
    assert "resumes from its newest valid checkpoint" in output.read_text()
    assert "resuming from checkpoint-" in output.read_text()
    assert read_losses(out) == pytest.approx(local_losses, abs=1e-6)


def test_a_run_resumes_with_the_node_that_is_left(
    plan: Path, cluster: Any, local_losses: list[float], tmp_path: Path
) -> None:
    """Immediately, or after the wait: Ray's count of nodes may still hold the dead one."""
    out, output = tmp_path / "out", tmp_path / "output"
    words = ["launch", str(plan), "--on", "ray", "--address", cluster.address, "--no-check-nodes", "--restarts", "1"]
    running = started([*words, "--min-nodes", "1", "--wait-for-nodes", "30", "--", *saving(out)], output)
    until(saved(out, 20).exists, 200, "checkpoint", output)
    cluster.remove_node(next(node for node in cluster.list_all_nodes() if not node.is_head()), allow_graceful=False)
    try:
        assert running.wait(timeout=300) == 0, output.read_text()
    finally:
        cluster.add_node(**NODE)
    assert "resumes from its newest valid checkpoint, with 1 node(s)" in output.read_text()
    assert "resuming from checkpoint-" in output.read_text()
    assert read_losses(out) == pytest.approx(local_losses, abs=1e-5)


def test_a_cluster_that_is_too_small_is_reported_before_anything_is_submitted(
    model: Path, cluster: Any, tmp_path: Path
) -> None:
    plan = planned(model, tmp_path / "plan", "3x1xCPU", global_batch_size=6)
    words = ["launch", str(plan), "--on", "ray", "--", *training(tmp_path / "out")]
    done = shardwright(words, RAY_ADDRESS=cluster.address)
    assert done.returncode == 2
    assert "the plan has 3 nodes with 1 CPU each, but the cluster has 2" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
