"""Cluster jobs that run a plan: SLURM, Kubeflow Trainer, JobSet and SkyPilot."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from ..specs.errors import ConfigError
from ..specs.hardware import HardwareSpec
from .rendering import LaunchSpec, NodePlace

_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
"""A DNS label, short enough for the names of pods, which contain it."""
_SETTING = re.compile(r"--[a-z][a-z-]*(=[ -~]+)?")
SAVING_SECONDS = 300
"""Default time in seconds to write a checkpoint after a scheduler stops the run."""
RESUME = "--resume-or-anew"
"""Argument of a restarted run: resumes, or starts again if no checkpoint is valid, because no user can decide."""
_STOPPED = 143
"""Exit code of a run that saved after SIGTERM."""
_MEETING = (
    "set -uo pipefail\n"
    'main_address="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"\n'
    "# Two jobs that share a machine meet at different ports.\n"
    "main_port=$((20000 + SLURM_JOB_ID % 10000))\n"
)
"""Script lines that set the rendezvous address and port."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterJob:
    """A plan with a script or `train`, for the nodes of a cluster."""

    plan: LaunchSpec
    directory: str
    """Directory of the plan, the same path on every node."""
    program: tuple[str, ...] = ("shardwright",)
    """Command on a node."""
    script: str | None = None
    """The user's script; `None` for `train`."""
    arguments: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    """Further options of `shardwright launch`, such as `--no-check-nodes`."""
    name: str = "shardwright"

    def node_words(self, place: NodePlace, *options: str) -> list[str]:
        """Return the command of one node, with further options of `shardwright launch`."""
        meeting = ["--main-address", place.main_address, "--main-port", str(place.main_port)]
        words = [*self.program, "launch", self.directory, "--node-rank", str(place.rank), *meeting]
        words += [] if place.nodes is None else ["--nodes", str(place.nodes)]
        words += [*self.options, *options]
        return [*words, "--", *self.words_behind]

    @property
    def words_behind(self) -> tuple[str, ...]:
        return self.arguments if self.script is None else (self.script, *self.arguments)

    def resumed(self) -> ClusterJob:
        """Return the job that resumes from the newest valid checkpoint, or starts again without one.

        A user's script must do that itself, so its job is returned unchanged.
        """
        if self.script is not None or "--resume" in self.arguments:
            return self
        return replace(self, arguments=(*self.arguments, RESUME))


def name_errors(name: str) -> list[ConfigError]:
    """Return an error for a name that a scheduler, a shell or YAML would not read as a plain name."""
    if _NAME.fullmatch(name):
        return []
    rule = "must be at most 40 lower-case letters, digits and hyphens, with a letter first"
    return [ConfigError(where="name", value=name, rule=rule)]


def setting_errors(settings: Sequence[str]) -> list[ConfigError]:
    """Return an error for each invalid option of `sbatch`; a line break would add a line to the script."""
    return [
        ConfigError(
            where="sbatch", value=setting, rule="must have the form --NAME=VALUE", fix="such as --partition=gpu"
        )
        for setting in settings
        if not _SETTING.fullmatch(setting)
    ]


def placeholder_hosts(plan: LaunchSpec) -> list[str]:
    """Return the placeholders for host names in the hostfile that `plan` writes."""
    return [f"node-{index}" for index in range(plan.hardware.nodes)]


def hostfile(plan: LaunchSpec) -> str:
    """Return the hostfile of `--on ssh` and of DeepSpeed's launchers, with placeholder names."""
    return "".join(f"{name} slots={plan.hardware.gpus_per_node}\n" for name in placeholder_hosts(plan))


def slurm_script(
    job: ClusterJob, header: str = "", *, settings: tuple[str, ...] = (), saving_seconds: int = SAVING_SECONDS
) -> str:
    """Return an `sbatch` script: one launcher per node, stopped in time to save, then requeued to resume."""
    further = ("--requeue", "--open-mode=append", f"--signal=TERM@{saving_seconds}", *settings)
    directory = '"$SLURM_SUBMIT_DIR"' if job.directory == "." else shlex.quote(job.directory)
    behind, options = shlex.join(job.words_behind), "".join(f"{shlex.quote(word)} " for word in job.options)
    # Node-specific arguments follow the words that are the same on all nodes.
    same = len(job.program) + 2
    return (
        f"{_sbatch_head(job.plan.hardware, job.name, further)}{header}{_MEETING}"
        f'set -- {behind}{" " if behind else ""}"$@"\n'
        "# Your own script must read SLURM_RESTART_COUNT itself.\n"
        'case "${1:--}" in -*) set -- "$@" ${SLURM_RESTART_COUNT:+"'
        f'{RESUME}"}} ;; esac\n'
        f"srun --wait={saving_seconds} bash -c "
        f'\'exec "${{@:1:{same}}}" --node-rank "$SLURM_NODEID" "${{@:{same + 1}}}"\' node '
        f"{shlex.join(job.program)} launch {directory} "
        f'--main-address "$main_address" --main-port "$main_port" {options}-- "$@"\n'
        "code=$?\n"
        "# The run was stopped before its time limit and has saved. Requeue it to resume, if it made progress.\n"
        f'if [ "$code" -eq {_STOPPED} ] && {shlex.join(job.program)} launch {directory} --turn-ended -- "$@"; then\n'
        '  scontrol requeue "$SLURM_JOB_ID"\n'
        "fi\n"
        'exit "$code"\n'
    )


def slurm_command_script(
    words: Sequence[str],
    hardware: HardwareSpec,
    *,
    name: str,
    settings: tuple[str, ...] = (),
    saving_seconds: int = SAVING_SECONDS,
) -> str:
    """Return an `sbatch` script that runs one command on every node, stopped in time to save.

    Node rank and rendezvous address are appended to the command. The job is not requeued; the caller decides how its
    command resumes.
    """
    head = _sbatch_head(hardware, name, ("--no-requeue", f"--signal=TERM@{saving_seconds}", *settings))
    # After the other nodes have ended, node 0 may still report and upload, without a time limit.
    return (
        f"{head}{_MEETING}srun --wait=0 bash -c "
        f'\'exec "$@" --node-rank "$SLURM_NODEID"\' node {shlex.join(words)} '
        '--main-address "$main_address" --main-port "$main_port"\n'
    )


def _sbatch_head(hardware: HardwareSpec, name: str, further: Sequence[str]) -> str:
    """Return the head of an `sbatch` script with one launcher per exclusive node."""
    options = [f"--job-name={name}", f"--nodes={hardware.nodes}", "--ntasks-per-node=1"]
    if hardware.gpu != "CPU":
        options.append(f"--gpus-per-node={hardware.gpus_per_node}")
    return "#!/usr/bin/env bash\n" + "".join(f"#SBATCH {option}\n" for option in [*options, "--exclusive", *further])


PLAN_DIRECTORY = "/shardwright/plan"
"""Read-only directory of the plan's files in a container."""
_SCRIPT_DIRECTORY = "/shardwright/script"
_LARGEST_CONFIG_MAP_BYTES = 2**20
"""Size limit of a Kubernetes ConfigMap."""
_MOUNT = re.compile(r"(?P<claim>[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?):(?P<path>/[A-Za-z0-9._/-]+)")
_SKYPILOT_NAMES = {"A100-40GB": "A100", "H100-80GB": "H100", "V100-16GB": "V100"}
"""SkyPilot accelerator names that differ from ours (skypilot 0.14.1, `sky show-gpus`)."""


def manifest_errors(job: ClusterJob, files: Mapping[str, str], *, image: str, volume: str) -> list[ConfigError]:
    """Return the errors of a job that has no valid Kubernetes manifest."""
    errors = name_errors(job.name)
    if not image or any(not character.isprintable() or character.isspace() for character in image):
        rule, fix = "must be the name of an image that contains shardwright", "pass --image REGISTRY/NAME:TAG"
        errors.append(ConfigError(where="image", value=image, rule=rule, fix=fix))
    if not _MOUNT.fullmatch(volume) or ".." in volume:
        rule, fix = "must have the form CLAIM:/PATH, a volume that every node can write to", "pass --volume"
        errors.append(ConfigError(where="volume", value=volume, rule=rule, fix=fix))
    size = sum(len(text.encode()) for text in files.values())
    if size > _LARGEST_CONFIG_MAP_BYTES:
        rule = f"must be at most {_LARGEST_CONFIG_MAP_BYTES} bytes for a ConfigMap"
        fix = "put the script into the image"
        errors.append(ConfigError(where="files", value=size, rule=rule, fix=fix))
    return errors


def config_map(job: ClusterJob, files: Mapping[str, str]) -> dict[str, object]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{job.name}-plan"}, "data": dict(files)}


def job_set(job: ClusterJob, *, image: str, volume: str, restarts: int = 0) -> dict[str, object]:
    """Return a JobSet of one pod per node; the others reach pod 0 by its name."""
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


def train_job(job: ClusterJob, *, image: str, volume: str) -> dict[str, object]:
    """Return a TrainJob on Kubeflow's torch runtime, which sets node rank and rendezvous in variables."""
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


def sky_task(job: ClusterJob) -> dict[str, object]:
    """Return a SkyPilot task, which copies the plan and sets the node rank."""
    hardware = job.plan.hardware
    place = NodePlace(rank="\0rank", main_address="\0address")
    mounts = {PLAN_DIRECTORY: job.directory}
    inside = replace(job, directory=PLAN_DIRECTORY, program=("shardwright",))
    if job.script is not None:
        script = f"{_SCRIPT_DIRECTORY}/{PurePosixPath(job.script).name}"
        mounts[script] = job.script
        inside = replace(inside, script=script)
    variables = {"\0rank": '"$SKYPILOT_NODE_RANK"', "\0address": '"$main_address"'}
    run = " ".join(variables.get(word) or shlex.quote(word) for word in inside.node_words(place))
    resources: dict[str, object] = {}
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
    """Return the command of a container; `train` writes to the volume and resumes after a restart."""
    inside = replace(job, directory=PLAN_DIRECTORY, program=("shardwright",))
    if job.script is not None:
        return replace(inside, script=f"{PLAN_DIRECTORY}/{PurePosixPath(job.script).name}").node_words(place)
    output = () if has_output_directory(job.arguments) else ("--output-dir", f"{_path(volume)}/{job.name}")
    return replace(inside, arguments=(*output, *job.arguments)).resumed().node_words(place)


def has_output_directory(arguments: Sequence[str]) -> bool:
    """Return whether arguments of a training have its output directory, in either spelling."""
    return any(word.partition("=")[0] in ("--output-dir", "--output_dir") for word in arguments)


def _path(volume: str) -> str:
    return volume.partition(":")[2].rstrip("/")


def _mounts(volume: str) -> list[dict[str, object]]:
    return [
        {"name": "plan", "mountPath": PLAN_DIRECTORY, "readOnly": True},
        {"name": "output", "mountPath": _path(volume)},
        {"name": "shared-memory", "mountPath": "/dev/shm"},  # noqa: S108
    ]


def _volumes(job: ClusterJob, volume: str) -> list[dict[str, object]]:
    return [
        {"name": "plan", "configMap": {"name": f"{job.name}-plan"}},
        {"name": "output", "persistentVolumeClaim": {"claimName": volume.partition(":")[0]}},
        # NCCL ranks of one node share it; the default of a container is 64 MB.
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]


def _resources(hardware: HardwareSpec) -> dict[str, object]:
    if hardware.gpu == "CPU":
        return {}
    vendors = {"MI": "amd.com/gpu", "Gaudi": "habana.ai/gaudi"}
    name = next((known for start, known in vendors.items() if hardware.gpu.startswith(start)), "nvidia.com/gpu")
    return {"limits": {name: str(hardware.gpus_per_node)}}
