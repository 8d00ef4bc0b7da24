"""Submission of the files that `ds_configs/plan` renders to schedulers, with `sbatch`, `kubectl` and `sky`."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ...ds_configs.plan.clusters import ClusterJob
from ...ds_configs.specs.errors import ConfigError, ShardwrightError
from ...ds_configs.specs.hardware import HardwareSpec

_ASK_SECONDS = 120.0


def program_errors(on: str, program: str) -> list[ConfigError]:
    """Return an error if a program is not on PATH."""
    if shutil.which(program) is not None:
        return []
    fix = f"install and configure it, or copy the output of --dry-run to a machine with {program}"
    return [ConfigError(where="on", value=on, rule=f"{program} is not on PATH", fix=fix)]


def plan_files(job: ClusterJob) -> dict[str, str]:
    """Return the contents of the plan's files and the script of a job."""
    directory = Path(job.directory)
    files = [directory / name for name in job.plan.file_names if name.endswith((".json", ".yaml"))]
    files += [] if job.script is None else [Path(job.script)]
    return {file.name: file.read_text(encoding="utf-8") for file in files}


def apply(manifests: str) -> str:
    """Submit manifests to Kubernetes, and return its output.

    Raises:
        ShardwrightError: Kubernetes rejects them; contains its message.
    """
    return submitted(["kubectl", "apply", "--filename", "-"], text=manifests)


def launch_task(task: str) -> str:
    """Submit a task to SkyPilot without waiting for it, and return the output.

    Raises:
        ShardwrightError: SkyPilot rejects it; contains its message.
    """
    with tempfile.TemporaryDirectory(prefix="shardwright-sky-") as directory:
        file = Path(directory) / "task.yaml"
        file.write_text(task, encoding="utf-8")
        return submitted(["sky", "launch", "--yes", "--detach-run", str(file)], seconds=None)


def submitted(command: Sequence[str], *, text: str | None = None, seconds: float | None = _ASK_SECONDS) -> str:
    """Run a scheduler's command, and return its output.

    Raises:
        ShardwrightError: it fails or times out; contains its message.
    """
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=seconds, check=False, errors="replace"
        )
    except subprocess.TimeoutExpired:
        raise ShardwrightError(
            f"{command[0]} did not answer within {seconds:.0f} s; check that its server is running"
        ) from None
    if done.returncode != 0:
        raise ShardwrightError(f"{command[0]}: {' '.join((done.stderr or done.stdout).split())}")
    return done.stdout


def cluster_errors(hardware: HardwareSpec, settings: Sequence[str]) -> list[ConfigError]:
    """Return errors if SLURM is missing or the cluster has too few nodes."""
    errors = program_errors("slurm", "sbatch")
    if errors:
        return errors
    partitions = [setting for setting in settings if setting.startswith("--partition=")]
    counted = submitted(["sinfo", "--noheader", "--format=%D", *partitions])
    there = sum(int(line) for line in counted.split())
    if there < hardware.nodes:
        rule = f"the plan has {hardware.nodes} nodes, but the cluster has {there}" + (
            f" in {partitions[0].removeprefix('--partition=')}" if partitions else ""
        )
        errors.append(ConfigError(where="nodes", value=hardware.name, rule=rule, fix="plan for fewer nodes"))
    return errors


def submit(script: str) -> str:
    """Submit a script to SLURM and return the job id.

    Raises:
        ShardwrightError: SLURM rejects it; contains its message.
    """
    return submitted(["sbatch", "--parsable"], text=script).strip().split(";")[0]
