"""Submission of the scripts that `ds_configs/plan` renders, with `sbatch`."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

from ...ds_configs.specs.errors import ConfigError, ShardwrightError
from ...ds_configs.specs.hardware import HardwareSpec

_ASK_SECONDS = 120.0


def program_errors(on: str, program: str) -> list[ConfigError]:
    """Return an error if a program is not on PATH."""
    if shutil.which(program) is not None:
        return []
    fix = f"install and configure it, or copy the output of --dry-run to a machine with {program}"
    return [ConfigError(where="on", value=on, rule=f"{program} is not on PATH", fix=fix)]


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
