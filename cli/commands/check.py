"""`shardwright check`: report all errors in configuration files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from pydantic import Field

from ...ds_configs.check.files import check
from ..options import CheckedFor, FormatOptions
from ..settings import FILLED, Options, command_line, grouped
from .report import check_output_file, write_output_file


@grouped
class CheckOptions(CheckedFor, FormatOptions):
    report: Path | None = Field(None, description="Also write the findings to this HTML file")
    force: bool = Field(False, description="Replace the file of --report")


def check_command(
    files: Annotated[list[Path], Parameter(negative="", json_list=False)],
    *,
    options: Annotated[CheckOptions, Options] = FILLED,
) -> int:
    """Find all errors in DeepSpeed JSON and Accelerate YAML files.

    The exit code is 2 for errors, and 0 for warnings only.

    Parameters
    ----------
    files
        Files, or the directory of a plan. The DeepSpeed JSON of an Accelerate YAML is checked too.
    """
    if options.report is not None:
        check_output_file(options.report, force=options.force)
    result = check(*files, num_processes=options.num_processes, transformers=options.transformers)
    if options.report is not None:
        from ...trainers.reports.markdown import html
        from ...trainers.reports.plans import check_report

        write_output_file(options.report, html(check_report(result.to_dict(), command=command_line())))
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
