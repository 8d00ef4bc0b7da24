"""`shardwright check`: reads configuration files and reports everything wrong with them at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from pydantic import Field

from ...ds_configs.check.files import check
from ..command_line import command_line
from ..options import CheckedFor, FormatOptions
from ..settings import FILLED, Options, grouped
from .report import check_output_file, write_output_file


@grouped
class CheckOptions(CheckedFor, FormatOptions):
    """Facts, and how findings are printed."""

    report: Path | None = Field(None, description="Write the findings to this HTML file, too")
    force: bool = Field(False, description="Replace the file that --report names")


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
    if options.report is not None:
        check_output_file(options.report, force=options.force)
    found = check(*files, num_processes=options.num_processes, transformers=options.transformers)
    if options.report is not None:
        from ...trainers.reports.make import check_report

        write_output_file(options.report, check_report(found.to_dict(), command=command_line()))
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
