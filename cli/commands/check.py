"""`shardwright check`: report all errors in configuration files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from ...ds_configs.check.files import check
from ..options import CheckedFor, Output
from ..settings import FILLED, Options


def check_command(
    files: Annotated[list[Path], Parameter(negative="", json_list=False)],
    *,
    facts: Options[CheckedFor] = FILLED,
    options: Options[Output] = FILLED,
) -> int:
    """Find all errors in DeepSpeed, Accelerate and TRL configuration files.

    The exit code is 2 for errors, and 0 for warnings only.

    Parameters
    ----------
    files
        Files, or the directory of a plan. Files that an Accelerate YAML or a TRL file names are checked too.
    """
    hardware = None
    if facts.hardware is not None:
        from ...plugins.planning import read_hardware

        hardware = read_hardware(facts.hardware)
    result = check(*files, **facts.model_dump(exclude={"hardware"}), hardware=hardware)
    if options.as_json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        from ..show import console, show_findings

        show_findings(result.findings)
        warnings = len(result.findings) - result.errors
        if not {str(file) for file in files}.issuperset(result.files):
            console().print(f"Checked {', '.join(result.files)}", markup=False)
        console().print(f"{len(result.files)} file(s): {result.errors} error(s), {warnings} warning(s)")
    return 2 if result.errors else 0
