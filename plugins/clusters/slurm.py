"""Submission to SLURM: the script that `ds_configs/plan/cluster_jobs.py` renders, handed to `sbatch`."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence

from ...ds_configs.plan.plan import Plan
from ...ds_configs.specs.errors import Fault, ShardwrightError

_SETTING = re.compile(r"--[a-z][a-z-]*(=[ -~]+)?")
_ASK_SECONDS = 60.0


def cluster_faults(plan: Plan, settings: Sequence[str]) -> list[Fault]:
    """Return what keeps a plan from this cluster's queue: no SLURM, too few nodes, or options that are none."""
    faults = [
        Fault(where="sbatch", value=setting, rule="must read --NAME=VALUE", fix="such as --partition=gpu")
        for setting in settings
        if not _SETTING.fullmatch(setting)
    ]
    if shutil.which("sbatch") is None:
        fix = "log in to a node of the cluster, or write the script with --dry-run and submit it there"
        return [*faults, Fault(where="on", value="slurm", rule="there is no sbatch on the path", fix=fix)]
    if faults:
        return faults
    partitions = [setting for setting in settings if setting.startswith("--partition=")]
    counted = _run(["sinfo", "--noheader", "--format=%D", *partitions])
    there = sum(int(line) for line in counted.split())
    if there < plan.hardware.nodes:
        rule = f"the plan has {plan.hardware.nodes} nodes, the cluster {there}" + (
            f" in {partitions[0].removeprefix('--partition=')}" if partitions else ""
        )
        faults.append(Fault(where="nodes", value=plan.hardware.name, rule=rule, fix="plan for what there is"))
    return faults


def submit(script: str) -> str:
    """Submit a script and return the number of the job.

    Raises:
        ShardwrightError: SLURM refuses it; says what SLURM said.
    """
    return _run(["sbatch", "--parsable"], text=script).strip().split(";")[0]


def _run(command: Sequence[str], text: str | None = None) -> str:
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=_ASK_SECONDS, check=False, errors="replace"
        )
    except subprocess.TimeoutExpired:
        raise ShardwrightError(f"{command[0]} gave no answer in {_ASK_SECONDS:.0f} s: is slurmctld up?") from None
    if done.returncode != 0:
        raise ShardwrightError(f"{command[0]}: {' '.join(done.stderr.split())}")
    return done.stdout
