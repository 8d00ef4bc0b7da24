"""`shardwright report`: the HTML report of a run, or a comparison of several runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from pydantic import Field

from ...ds_configs.specs.errors import ConfigError, UsageError
from ..options import FormatOptions
from ..settings import FILLED, Options, grouped


@grouped
class ReportFileOptions(FormatOptions):
    output: Path | None = Field(
        None, description="File to write. Default: report.html in the run's directory, or comparison.html"
    )
    force: bool = Field(False, description="Replace the file of --output")


def report_command(
    runs: Annotated[list[Path], Parameter(negative="", json_list=False)],
    *,
    options: Annotated[ReportFileOptions, Options] = FILLED,
) -> int:
    """Write the HTML report of a run from its files, or a comparison of several runs.

    The report is one file without external resources.

    Parameters
    ----------
    runs
        Output directories of plan, train, distill, qat, quantize or evaluate.
    """
    from ...trainers.reports.make import REPORT_FILE, report_html

    output = options.output
    if output is None:
        # The report of one run can be written again from the same files, so it needs no --force.
        output = (runs[0] if runs[0].is_dir() else runs[0].parent) / REPORT_FILE if len(runs) == 1 else COMPARISON
    check_output_file(output, force=options.force or (options.output is None and len(runs) == 1))
    write_output_file(output, report_html(runs))
    if options.as_json:
        print(json.dumps({"schema_version": 1, "file": str(output), "runs": [str(run) for run in runs]}))
    else:
        from ..show import console

        console().print(f"Written: {output}", markup=False)
    return 0


COMPARISON = Path("comparison.html")


def check_output_file(file: Path, *, force: bool) -> None:
    """Check that a file can be written.

    Raises:
        UsageError: it is a directory, or exists and `force` is false.
    """
    if file.is_dir():
        rule, fix = "is a directory", "name a file, such as report.html"
    elif file.exists() and not force:
        rule, fix = "exists", "use --force to replace it"
    else:
        return
    raise UsageError(ConfigError(where="output", value=str(file), rule=rule, fix=fix))


def write_output_file(file: Path, text: str) -> None:
    """Write one file atomically, into a directory that may have other files."""
    from ...ds_configs.plan.output import write_files

    write_files({file.name: text}, file.parent, force=True)
