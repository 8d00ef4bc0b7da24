"""Manifests of every plan of the gallery with several nodes, as the models of Kubernetes' own interfaces read them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import shardwright
from shardwright.ds_configs.plan.clusters import (
    ClusterJob,
    config_map,
    job_set,
    manifest_errors,
    sky_task,
    slurm_script,
    train_job,
)
from shardwright.ds_configs.plan.plan import Plan, render_files

GALLERY = Path(shardwright.__file__).parent / "ds_configs" / "gallery"
SEVERAL = sorted(
    file.parent.name for file in GALLERY.glob("*/plan.json") if json.loads(file.read_text())["hardware"]["nodes"] > 1
)
WHERE = {"image": "registry.example/train:1", "volume": "team-data:/data"}


@pytest.fixture(scope="module", params=SEVERAL)
def job(request: pytest.FixtureRequest) -> ClusterJob:
    directory = GALLERY / request.param
    return ClusterJob(plan=Plan.load(directory), directory=str(directory), arguments=("--max-steps", "1,000 $HOME"))


def read(model: Any, manifest: dict[str, Any]) -> Any:
    """Read a manifest strictly: what the model does not know would be dropped on the way to the cluster."""
    found = model.from_dict(manifest)
    assert found.to_dict() == manifest
    return found


def test_gallery_has_plans_of_several_nodes() -> None:
    assert len(SEVERAL) >= 3


def test_manifests_are_valid_kubernetes(job: ClusterJob) -> None:
    from kubeflow_trainer_api import models

    files = render_files(job.plan)
    assert manifest_errors(job, files, **WHERE) == []
    plan = Plan.load(Path(job.directory))
    read(models.IoK8sApiCoreV1ConfigMap, config_map(job, files))
    jobs = read(models.JobsetV1alpha2JobSet, job_set(job, restarts=3, **WHERE))
    spec = jobs.spec.replicated_jobs[0].template.spec
    assert (spec.parallelism, spec.completions) == (plan.hardware.nodes, plan.hardware.nodes)
    container = spec.template.spec.containers[0]
    assert container.command[:3] == ["shardwright", "launch", "/shardwright/plan"]
    assert container.command[-3:] == ["--max-steps", "1,000 $HOME", "--resume-or-anew"]
    assert dict(container.resources.limits)["nvidia.com/gpu"].actual_instance == str(plan.hardware.gpus_per_node)
    training = read(models.TrainerV1alpha1TrainJob, train_job(job, **WHERE))
    assert training.spec.trainer.num_nodes == plan.hardware.nodes
    assert training.spec.trainer.command == [
        {"$(JOB_COMPLETION_INDEX)": "$(PET_NODE_RANK)", "shardwright-node-0-0.shardwright": "$(PET_MASTER_ADDR)"}.get(
            word, "$(PET_MASTER_PORT)" if word == "29500" else word
        )
        for word in container.command
    ]


def test_cluster_scripts_are_valid_bash(job: ClusterJob) -> None:
    for text in (sky_task(job)["run"], slurm_script(job, settings=("--partition=gpu",))):
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
        assert "'1,000 $HOME'" in text


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("a" * 41, {}, "at most 40"),
        ("yes:\n- x", {}, "at most 40"),
        ("fine", {"image": "two words"}, "must be the name of an image"),
        ("fine", {"volume": "claim:relative"}, "CLAIM:/PATH"),
        ("fine", {"volume": "claim:/../etc"}, "CLAIM:/PATH"),
    ],
)
def test_unsafe_names_are_rejected(name: str, changes: dict[str, str], said: str) -> None:
    directory = GALLERY / SEVERAL[0]
    job = ClusterJob(plan=Plan.load(directory), directory=str(directory), name=name)
    (error,) = manifest_errors(job, {}, **(WHERE | changes))
    assert said in error.rule
