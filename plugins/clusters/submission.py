"""Submission of the scripts that `ds_configs/plan` renders, with `sbatch`."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

from ...ds_configs.specs.errors import ConfigError, ShardwrightError, UsageError
from ...ds_configs.specs.hardware import HardwareSpec

_ANSWER_SECONDS = 120.0


def program_errors(on: str, program: str) -> list[ConfigError]:
    """Return an error if a program is not on PATH."""
    if shutil.which(program) is not None:
        return []
    fix = f"install and configure it, or copy the output of --dry-run to a machine with {program}"
    return [ConfigError(where="on", value=on, rule=f"{program} is not on PATH", fix=fix)]


def _output(command: Sequence[str], *, text: str | None = None) -> str:
    """Run a command of SLURM, and return its output.

    Raises:
        ShardwrightError: it fails or times out; contains its message.
    """
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False, errors="replace"
        )
    except subprocess.TimeoutExpired:
        raise ShardwrightError(
            f"{command[0]} did not answer within {_ANSWER_SECONDS:.0f} s; check that its server is running"
        ) from None
    if done.returncode != 0:
        raise ShardwrightError(f"{command[0]}: {' '.join((done.stderr or done.stdout).split())}")
    return done.stdout


def submit(script: str, hardware: HardwareSpec, settings: Sequence[str]) -> str:
    """Submit a script to SLURM and return the job id; `settings` are options of `sbatch` that it has.

    Raises:
        UsageError: SLURM is not installed, or the cluster has too few nodes.
        ShardwrightError: SLURM rejects the script; contains its message.
    """
    if errors := program_errors("slurm", "sbatch"):
        raise UsageError(errors)
    partitions = [setting for setting in settings if setting.startswith("--partition=")]
    there = sum(int(line) for line in _output(["sinfo", "--noheader", "--format=%D", *partitions]).split())
    if there < hardware.nodes:
        rule = f"the plan has {hardware.nodes} nodes, but the cluster has {there}" + (
            f" in {partitions[0].removeprefix('--partition=')}" if partitions else ""
        )
        raise UsageError(ConfigError(where="nodes", value=hardware.name, rule=rule, fix="plan for fewer nodes"))
    return _output(["sbatch", "--parsable"], text=script).strip().split(";")[0]
