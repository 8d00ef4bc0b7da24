"""Submission to SLURM: the script that `ds_configs/plan/cluster_jobs.py` renders, handed to `sbatch`."""

from __future__ import annotations

from collections.abc import Sequence

from ...ds_configs.specs.errors import Fault
from ...ds_configs.specs.hardware import HardwareSpec
from .submission import program_faults, submitted


def cluster_faults(hardware: HardwareSpec, settings: Sequence[str]) -> list[Fault]:
    """Return what keeps a run on some hardware from this cluster's queue: no SLURM, or too few nodes."""
    faults = program_faults("slurm", "sbatch")
    if faults:
        return faults
    partitions = [setting for setting in settings if setting.startswith("--partition=")]
    counted = submitted(["sinfo", "--noheader", "--format=%D", *partitions])
    there = sum(int(line) for line in counted.split())
    if there < hardware.nodes:
        rule = f"the plan has {hardware.nodes} nodes, the cluster {there}" + (
            f" in {partitions[0].removeprefix('--partition=')}" if partitions else ""
        )
        faults.append(Fault(where="nodes", value=hardware.name, rule=rule, fix="plan for what there is"))
    return faults


def submit(script: str) -> str:
    """Submit a script and return the number of the job.

    Raises:
        ShardwrightError: SLURM refuses it; says what SLURM said.
    """
    return submitted(["sbatch", "--parsable"], text=script).strip().split(";")[0]
