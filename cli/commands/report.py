"""`shardwright report`: the HTML report of a run, or of several side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from pydantic import Field

from ...ds_configs.specs.errors import Fault, UsageError
from ..options import FormatOptions
from ..settings import FILLED, Options, grouped


@grouped
class ReportFileOptions(FormatOptions):
    """Place of a report."""

    output: Path | None = Field(
        None, description="File to write. Default: report.html in the run's directory, comparison.html for several"
    )
    force: bool = Field(False, description="Replace the file that --output names")


def report_command(
    runs: Annotated[list[Path], Parameter(negative="", json_list=False)],
    *,
    options: Annotated[ReportFileOptions, Options] = FILLED,
) -> int:
    """Make the HTML report of a run from the files that it left; of several runs, side by side.

    One file, which asks nothing of the network. Example: shardwright report tuned tuned-lora --output both.html

    Parameters
    ----------
    runs
        Output directories of plan, rehearse, train, distill, qat, quantize or evaluate.
    """
    from ...trainers.reports.make import REPORT_FILE, report_html

    output = options.output
    if output is None:
        # A report of one run is made again from the same files; only what somebody named may be something else.
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
    """Refuse a file that is there already, or that cannot be one.

    Raises:
        UsageError: it is a directory, or exists and `force` is false.
    """
    where, value = "output", str(file)
    if file.is_dir():
        raise UsageError(Fault(where=where, value=value, rule="is a directory", fix="name a file, such as report.html"))
    if file.exists() and not force:
        raise UsageError(Fault(where=where, value=value, rule="exists", fix="use --force to replace it"))


def write_output_file(file: Path, text: str) -> None:
    """Write one file that is whole or not there, whatever lies beside it."""
    from ...ds_configs.plan.write import write_files

    write_files({file.name: text}, file.parent, force=True)
