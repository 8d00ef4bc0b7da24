"""`shardwright check`: reads configuration files and reports everything wrong with them at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from ...ds_configs.check.files import check
from ..options import CheckedFor, FormatOptions
from ..settings import FILLED, Options, grouped


@grouped
class CheckOptions(CheckedFor, FormatOptions):
    """Facts, and how findings are printed."""


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
        Files to check; an Accelerate YAML also brings the DeepSpeed JSON that it names, a plan's directory its files.
    """
    found = check(*files, num_processes=options.num_processes, transformers=options.transformers)
    if options.as_json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        from ..show import console, show_findings

        show_findings(found.findings)
        warnings = len(found.findings) - found.errors
        if not {str(file) for file in files}.issuperset(found.files):
            console().print(f"Checked {', '.join(found.files)}", markup=False)
        console().print(f"{len(found.files)} file(s): {found.errors} error(s), {warnings} warning(s)")
    return 2 if found.errors else 0
