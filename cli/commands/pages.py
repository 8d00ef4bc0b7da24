"""`shardwright report` and `ui`: the HTML report of a run, and the planner page."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from pydantic import Field

from ...ds_configs.specs.errors import ConfigError, ShardwrightError, UsageError
from ..options import ConfigFile, Output
from ..settings import FILLED, Options


class ReportFlags(Output):
    output: Path | None = Field(None, description="File to write. Default: report.html in the run's directory")
    force: bool = Field(False, description="Replace the file of --output")


def report_command(
    runs: Annotated[list[Path], Parameter(name="run", negative="", json_list=False)],
    *,
    options: Options[ReportFlags] = FILLED,
) -> int:
    """Write the HTML report of a run from its files.

    The report is one file without external resources.

    Parameters
    ----------
    runs
        Output directory of plan, train, distill, qat, quantize or evaluate.
    """
    from ...ds_configs.plan.output import write_files
    from ...trainers.reports.runs import REPORT_FILE, report_html

    run, *others = runs
    errors = []
    if others:
        rule, fix = "a report shows one run", "compare runs in a tracker: train with --report-to tensorboard or trackio"
        errors.append(ConfigError(where="run", value=str(others[0]), rule=rule, fix=fix))
    output = (run if run.is_dir() else run.parent) / REPORT_FILE if options.output is None else options.output
    if output.is_dir():
        rule, fix = "is a directory", "name a file, such as report.html"
        errors.append(ConfigError(where="output", value=str(output), rule=rule, fix=fix))
    # The default file can be written again from the same files.
    elif options.output is not None and output.exists() and not options.force:
        errors.append(ConfigError(where="output", value=str(output), rule="exists", fix="use --force to replace it"))
    if errors:
        raise UsageError(errors)
    # Atomically, into a directory that may have other files.
    write_files({output.name: report_html(run)}, output.parent, force=True)
    if options.as_json:
        print(json.dumps({"schema_version": 1, "file": str(output), "runs": [str(run)]}))
    else:
        from ..show import console

        console().print(f"Written: {output}", markup=False)
    return 0


class PageFlags(ConfigFile):
    group = "Run"

    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 for other machines too")
    port: int = Field(7860, ge=0, le=65535, description="Port to listen on; 0 for any free port")


def ui_command(*, options: Options[PageFlags] = FILLED) -> int:
    """Plan and check in the browser: figures, alternatives, files to download, and an address for each plan.

    Only requests to the Hub for the models that you name leave this machine. Stop it with Ctrl-C.
    """
    if importlib.util.find_spec("gradio") is None:
        raise ShardwrightError("the page needs gradio, which is not installed; pip install 'shardwright[ui]'")
    from ..page.app import serve

    serve(options.host, options.port, announce=lambda address: print(f"Shardwright planner: {address}", flush=True))
    return 0
