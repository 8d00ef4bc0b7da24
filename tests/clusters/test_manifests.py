"""Files of examples/clusters, as the models of Kubernetes' own interfaces and SkyPilot's own loader read them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from shardwright.cli.main import build_app
from shardwright.cli.settings import resolve

EXAMPLES = Path(__file__).parents[2] / "examples" / "clusters"
LOADER = """
import sys, sky
task = sky.Task.from_yaml(sys.argv[1])
print("TASK", task.num_nodes, [dict(resources.accelerators) for resources in task.resources])
"""


def read(name: str, model: Any) -> Any:
    """Read a manifest strictly: what the model does not know would be dropped on the way to the cluster."""
    manifest = yaml.safe_load((EXAMPLES / name).read_text(encoding="utf-8"))
    found = model.from_dict(manifest)
    assert found.to_dict() == manifest
    return found


@pytest.mark.clusters
def test_manifests_are_valid_kubernetes_and_start_the_launcher() -> None:
    from kubeflow_trainer_api import models

    spec = read("jobset.yaml", models.JobsetV1alpha2JobSet).spec.replicated_jobs[0].template.spec
    assert spec.parallelism == spec.completions
    training = read("kubeflow.yaml", models.TrainerV1alpha1TrainJob)
    for command in (spec.template.spec.containers[0].command, training.spec.trainer.command):
        words = [{"$(JOB_COMPLETION_INDEX)": "1", "$(PET_NODE_RANK)": "1"}.get(word, word) for word in command[1:]]
        _, bound = resolve(build_app(), ["29500" if word == "$(PET_MASTER_PORT)" else word for word in words])
        assert bound.arguments["options"].place().rank == 1
        assert bound.args[1] == "--dataset" or "--dataset" in bound.args


@pytest.mark.clusters
def test_skypilot_reads_its_task() -> None:
    file = EXAMPLES / "skypilot.yaml"
    python = os.environ["SKYPILOT_PYTHON"]
    done = subprocess.run([python, "-c", LOADER, str(file)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "TASK 2 [{'A100-80GB': 8" in done.stdout
    run = yaml.safe_load(file.read_text(encoding="utf-8"))["run"]
    subprocess.run(["bash", "-n"], input=run, text=True, check=True)
