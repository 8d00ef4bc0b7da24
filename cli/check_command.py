"""The `check` command: prints what `run_check` finds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from ..ds_configs.errors import Fault, UsageError
from .check import findings_as_dicts, run_check


def check_command(
    files: Annotated[list[Path], Parameter(negative="")],
    /,
    *,
    num_processes: int | None = None,
    transformers: bool = True,
    format: Literal["human", "json"] = "human",
) -> int:
    """Find every fault in DeepSpeed JSON and Accelerate YAML files, whoever wrote them.

    Exit code 2 when there is an error; warnings alone give 0. Example: shardwright check ds_config.json

    Parameters
    ----------
    files
        Files to check; an Accelerate YAML also brings the DeepSpeed JSON that it names.
    num_processes
        Ranks of the job, to check the batch equation.
    transformers
        Whether the files are for the Trainer, which fills in "auto".
    format
        human or json; json prints one object on stdout.
    """
    if num_processes is not None and num_processes < 1:
        raise UsageError(Fault(where="num_processes", value=num_processes, rule="must be at least 1"))
    findings = run_check(files, world_size=num_processes, uses_transformers=transformers)
    errors = sum(finding.kind == "error" for finding in findings)
    if format == "json":
        print(json.dumps({"schema_version": 1, "errors": errors, "findings": findings_as_dicts(findings)}, indent=2))
    else:
        from .show import console, show_findings

        show_findings(findings)
        warnings = len(findings) - errors
        console().print(f"{len(files)} file(s): {errors} error(s), {warnings} warning(s)")
    return 2 if errors else 0
