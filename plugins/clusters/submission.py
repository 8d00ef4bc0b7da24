"""Submission of manifests: `kubectl` and `sky` are handed what `ds_configs/plan/cluster_manifests.py` renders."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ...ds_configs.plan.cluster_jobs import ClusterJob
from ...ds_configs.specs.errors import Fault, ShardwrightError

_ASK_SECONDS = 120.0


def program_faults(on: str, program: str) -> list[Fault]:
    """Return a fault where the program that submits is not on the path."""
    if shutil.which(program) is not None:
        return []
    fix = f"install and configure it, or take the file that --dry-run prints to where {program} is"
    return [Fault(where="on", value=on, rule=f"there is no {program} on the path", fix=fix)]


def plan_files(job: ClusterJob) -> dict[str, str]:
    """Return the texts that go with a job: the plan's own files, and the script."""
    directory = Path(job.directory)
    files = [directory / name for name in job.plan.file_names if name.endswith((".json", ".yaml"))]
    files += [] if job.script is None else [Path(job.script)]
    return {file.name: file.read_text(encoding="utf-8") for file in files}


def apply(manifests: str) -> str:
    """Hand manifests to Kubernetes, and return what it says.

    Raises:
        ShardwrightError: it refuses them; says what it said.
    """
    return submitted(["kubectl", "apply", "--filename", "-"], text=manifests)


def launch_task(task: str) -> str:
    """Hand a task to SkyPilot without following it, and return what it says.

    Raises:
        ShardwrightError: it refuses it; says what it said.
    """
    with tempfile.TemporaryDirectory(prefix="shardwright-sky-") as directory:
        file = Path(directory) / "task.yaml"
        file.write_text(task, encoding="utf-8")
        return submitted(["sky", "launch", "--yes", "--detach-run", str(file)], seconds=None)


def submitted(command: Sequence[str], *, text: str | None = None, seconds: float | None = _ASK_SECONDS) -> str:
    """Run a command that submits or asks, and return what it printed.

    Raises:
        ShardwrightError: it fails or does not answer; says what it said.
    """
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=seconds, check=False, errors="replace"
        )
    except subprocess.TimeoutExpired:
        raise ShardwrightError(f"{command[0]} gave no answer in {seconds:.0f} s: is its server up?") from None
    if done.returncode != 0:
        raise ShardwrightError(f"{command[0]}: {' '.join((done.stderr or done.stdout).split())}")
    return done.stdout
