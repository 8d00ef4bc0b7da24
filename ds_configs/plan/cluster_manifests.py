"""Manifests of a job for Kubernetes and SkyPilot: what Kubeflow Trainer, JobSet and SkyPilot start on each node.

The plan's files travel within the manifest, as a ConfigMap or as files that SkyPilot copies.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from ..specs.errors import Fault
from ..specs.hardware import HardwareSpec
from .cluster_jobs import SAVING_SECONDS, ClusterJob, name_faults
from .launch import NodePlace

PLAN_DIRECTORY = "/shardwright/plan"
"""Where the plan's files lie in a container, read-only."""
_SCRIPT_DIRECTORY = "/shardwright/script"
_LARGEST_CONFIG_MAP_BYTES = 2**20
"""What Kubernetes keeps in one ConfigMap."""
_MOUNT = re.compile(r"(?P<claim>[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?):(?P<path>/[A-Za-z0-9._/-]+)")
_SKYPILOT_NAMES = {"A100-40GB": "A100", "H100-80GB": "H100", "V100-16GB": "V100"}
"""Names of its catalog where they differ from ours (skypilot 0.14.1, `sky show-gpus`)."""


def manifest_faults(job: ClusterJob, files: Mapping[str, str], *, image: str, volume: str) -> list[Fault]:
    """Return why a job has no manifest for Kubernetes."""
    faults = name_faults(job.name)
    if not image or any(not character.isprintable() or character.isspace() for character in image):
        rule, fix = "must name an image with shardwright in it", "give --image REGISTRY/NAME:TAG"
        faults.append(Fault(where="image", value=image, rule=rule, fix=fix))
    if not _MOUNT.fullmatch(volume) or ".." in volume:
        rule, fix = "must read CLAIM:/PATH, a volume that every node writes to", "give --volume"
        faults.append(Fault(where="volume", value=volume, rule=rule, fix=fix))
    size = sum(len(text.encode()) for text in files.values())
    if size > _LARGEST_CONFIG_MAP_BYTES:
        rule, fix = f"a ConfigMap holds {_LARGEST_CONFIG_MAP_BYTES} bytes", "put the script into the image"
        faults.append(Fault(where="files", value=size, rule=rule, fix=fix))
    return faults


def config_map(job: ClusterJob, files: Mapping[str, str]) -> dict[str, Any]:
    """Return the ConfigMap with the plan's files, and the script where there is one."""
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{job.name}-plan"}, "data": dict(files)}


def job_set(job: ClusterJob, *, image: str, volume: str, restarts: int = 0) -> dict[str, Any]:
    """Return a JobSet of one pod for each node; pod 0 is known to the others by its name."""
    nodes = job.plan.hardware.nodes
    place = NodePlace(rank="$(JOB_COMPLETION_INDEX)", main_address=f"{job.name}-node-0-0.{job.name}")
    container = {
        "name": "node",
        "image": image,
        "command": _node_words(job, place, volume),
        "resources": _resources(job.plan.hardware),
        "volumeMounts": _mounts(volume),
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": SAVING_SECONDS,
        "containers": [container],
        "volumes": _volumes(job, volume),
    }
    indexed = {"parallelism": nodes, "completions": nodes, "completionMode": "Indexed", "backoffLimit": 0}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name},
        "spec": {
            "failurePolicy": {"maxRestarts": restarts},
            "network": {"enableDNSHostnames": True, "subdomain": job.name},
            "replicatedJobs": [
                {"name": "node", "replicas": 1, "template": {"spec": indexed | {"template": {"spec": pod}}}}
            ],
        },
    }


def train_job(job: ClusterJob, *, image: str, volume: str) -> dict[str, Any]:
    """Return a TrainJob on Kubeflow's own runtime of torch, whose variables say each node's place."""
    place = NodePlace(rank="$(PET_NODE_RANK)", main_address="$(PET_MASTER_ADDR)", main_port="$(PET_MASTER_PORT)")
    pod = {
        "volumes": _volumes(job, volume),
        "terminationGracePeriodSeconds": SAVING_SECONDS,
        "containers": [{"name": "node", "volumeMounts": _mounts(volume)}],
    }
    replicated = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": job.name},
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": {
                "image": image,
                "numNodes": job.plan.hardware.nodes,
                "command": _node_words(job, place, volume),
                "resourcesPerNode": _resources(job.plan.hardware),
            },
            "runtimePatches": [
                {
                    "manager": "shardwright.dev/launch",
                    "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [replicated]}}},
                }
            ],
        },
    }


def sky_task(job: ClusterJob) -> dict[str, Any]:
    """Return a task of SkyPilot, which copies the plan and says each node its place."""
    hardware = job.plan.hardware
    place = NodePlace(rank="\0rank", main_address="\0address")
    mounts = {PLAN_DIRECTORY: job.directory}
    inside = replace(job, directory=PLAN_DIRECTORY, program=("shardwright",))
    if job.script is not None:
        script = f"{_SCRIPT_DIRECTORY}/{PurePosixPath(job.script).name}"
        mounts[script] = job.script
        inside = replace(inside, script=script)
    stands_for = {"\0rank": '"$SKYPILOT_NODE_RANK"', "\0address": '"$main_address"'}
    run = " ".join(stands_for.get(word) or shlex.quote(word) for word in inside.node_words(place))
    resources: dict[str, Any] = {}
    if hardware.gpu != "CPU":
        resources["accelerators"] = {_SKYPILOT_NAMES.get(hardware.gpu, hardware.gpu): hardware.gpus_per_node}
    return {
        "name": job.name,
        "num_nodes": hardware.nodes,
        "resources": resources,
        "file_mounts": mounts,
        "setup": "pip install shardwright\n",
        "run": f'main_address="$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"\n{run}\n',
    }


def _node_words(job: ClusterJob, place: NodePlace, volume: str) -> list[str]:
    """Return the command of a container; the plan's own training writes to the volume, and goes on in a second turn."""
    inside = replace(job, directory=PLAN_DIRECTORY, program=("shardwright",))
    if job.script is not None:
        return replace(inside, script=f"{PLAN_DIRECTORY}/{PurePosixPath(job.script).name}").node_words(place)
    output = ("--output-dir", f"{_path(volume)}/{job.name}")
    return replace(inside, arguments=(*output, *job.arguments)).resumed().node_words(place)


def _path(volume: str) -> str:
    return volume.partition(":")[2].rstrip("/")


def _mounts(volume: str) -> list[dict[str, Any]]:
    return [
        {"name": "plan", "mountPath": PLAN_DIRECTORY, "readOnly": True},
        {"name": "output", "mountPath": _path(volume)},
        {"name": "shared-memory", "mountPath": "/dev/shm"},  # noqa: S108
    ]


def _volumes(job: ClusterJob, volume: str) -> list[dict[str, Any]]:
    return [
        {"name": "plan", "configMap": {"name": f"{job.name}-plan"}},
        {"name": "output", "persistentVolumeClaim": {"claimName": volume.partition(":")[0]}},
        # NCCL's ranks of one node meet in it; a container has 64 MB of its own.
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]


def _resources(hardware: HardwareSpec) -> dict[str, Any]:
    if hardware.gpu == "CPU":
        return {}
    vendors = {"MI": "amd.com/gpu", "Gaudi": "habana.ai/gaudi"}
    name = next((known for start, known in vendors.items() if hardware.gpu.startswith(start)), "nvidia.com/gpu")
    return {"limits": {name: str(hardware.gpus_per_node)}}
