"""`shardwright check`: reads configuration files and reports everything wrong with them at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from pydantic import Field

from ..ds_configs.check import Finding
from ..ds_configs.check.files import run_check
from .options import FormatOptions
from .settings import FILLED, Options, grouped


@grouped
class CheckOptions(FormatOptions):
    """What files are checked against."""

    group = "Run"

    num_processes: int | None = Field(None, ge=1, description="Ranks of the job, to check the batch equation")
    transformers: bool = Field(True, description='Whether the files are for the Trainer, which fills in "auto"')


def check_command(
    files: Annotated[list[Path], Parameter(negative="", json_list=False)],
    *,
    options: Annotated[CheckOptions, Options] = FILLED,
) -> int:
    """Find every fault in DeepSpeed JSON and Accelerate YAML files, whoever wrote them.

    Exit code 2 when there is an error; warnings alone give 0. Example: shardwright check ds_config.json

    Parameters
    ----------
    files
        Files to check; an Accelerate YAML also brings the DeepSpeed JSON that it names.
    """
    findings = run_check(files, world_size=options.num_processes, uses_transformers=options.transformers)
    errors = sum(finding.kind == "error" for finding in findings)
    if options.as_json:
        print(json.dumps({"schema_version": 1, "errors": errors, "findings": findings_as_dicts(findings)}, indent=2))
    else:
        from .show import console, show_findings

        show_findings(findings)
        warnings = len(findings) - errors
        console().print(f"{len(files)} file(s): {errors} error(s), {warnings} warning(s)")
    return 2 if errors else 0


def findings_as_dicts(findings: tuple[Finding, ...]) -> list[dict[str, Any]]:
    """Return findings as JSON-ready mappings with the keys kind, where, value, rule, fix and message."""
    return [
        {
            "kind": finding.kind,
            "where": finding.fault.where,
            "value": _json_value(finding.fault.value),
            "rule": finding.fault.rule,
            "fix": finding.fault.fix,
            "message": str(finding.fault),
        }
        for finding in findings
    ]


def _json_value(value: object) -> object:
    if isinstance(value, dict):
        return {str(key): _json_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_json_value(item) for item in value]
    if isinstance(value, float):
        return value if value - value == 0 else str(value)
    return value if isinstance(value, bool | int | str) or value is None else str(value)
