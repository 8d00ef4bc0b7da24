"""Checks of the files that `plan` writes, as they lie beside their `plan.json` now."""

from __future__ import annotations

from pathlib import Path

from ..plan.plan import Plan
from ..plan.training_arguments import planned_training_arguments
from ..specs.errors import Fault, FaultsError
from ..specs.json_text import strict_json
from .report import Finding

PLAN_FILE, ARGUMENTS_FILE, MEASUREMENT_FILE = "plan.json", "training_arguments.json", "plan_measurement.json"
SCRIPTS = ("launch.sh", "launch.sbatch", "hostfile")
CONFIGURATION = "accelerate.yaml"
"""File of a plan directory that brings the DeepSpeed JSON."""


def is_own_file(path: Path) -> bool:
    """Tell whether a file belongs to a plan and is no configuration of DeepSpeed or Accelerate."""
    own = path.name in (PLAN_FILE, ARGUMENTS_FILE, MEASUREMENT_FILE, *SCRIPTS)
    return own and (path.parent / PLAN_FILE).is_file()


def own_file_names(directory: Path) -> list[str]:
    """Return the files of a plan, beside its configurations, that lie in its directory."""
    return [name for name in (PLAN_FILE, ARGUMENTS_FILE) if (directory / name).is_file()]


def check_plan_directory(directory: Path) -> tuple[list[Finding], Plan | None]:
    """Return what is wrong with a plan's own files, and the plan where it can be read."""
    try:
        plan = Plan.load(directory)
    except FaultsError as error:
        return [_error(fault) for fault in error.faults], None
    missing = [name for name in plan.file_names if not (directory / name).is_file()]
    fix = "write the plan again"
    findings = [_error(Fault(where=str(directory / name), rule="is missing", fix=fix)) for name in missing]
    if ARGUMENTS_FILE not in missing:
        findings += _argument_findings(directory / ARGUMENTS_FILE, plan)
    return findings, plan


def _argument_findings(file: Path, plan: Plan) -> list[Finding]:
    """Compare what a script gives to `TrainingArguments` with the plan: another batch makes its prediction void."""
    try:
        stated = strict_json(file.read_bytes())
    except (OSError, ValueError) as error:
        return [_error(Fault(where=str(file), rule=f"is not valid JSON ({error})", fix="write the plan again"))]
    if not isinstance(stated, dict):
        return [_error(Fault(where=str(file), rule="must hold one JSON object of TrainingArguments keys"))]
    return [
        Finding(
            kind="warning",
            fault=Fault(
                where=f"{file}: {name}",
                value=stated.get(name),
                rule=f"is not the plan's {value!r}, so that its prediction is for another run",
                fix="plan again with what you want",
            ),
        )
        for name, value in planned_training_arguments(plan).items()
        if stated.get(name) != value
    ]


def moved_finding(directory: Path, named: Path) -> Finding | None:
    """Return a warning where `accelerate.yaml` names a DeepSpeed file of another place than its directory."""
    beside = directory / named.name
    if not beside.is_file() or (named.exists() and named.samefile(beside)):
        return None
    rule = f"names {named}, and the plan lies in {directory} now"
    fix = f"start with launch.sh or `shardwright launch`, or give --deepspeed_config_file {beside}"
    where = f"{directory / CONFIGURATION}: deepspeed_config.deepspeed_config_file"
    return Finding(kind="warning", fault=Fault(where=where, rule=rule, fix=fix))


def _error(fault: Fault) -> Finding:
    return Finding(kind="error", fault=fault)
