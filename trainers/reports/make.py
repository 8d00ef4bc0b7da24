"""Reports of directories: `report_html` makes the page of one run or of several, `write_html` leaves it there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...ds_configs.plan.write import write_files
from .checked import check_page
from .comparison import comparison_command, comparison_page
from .page import html
from .read import read_page

REPORT_FILE = "report.html"


def report_html(directories: Sequence[str | Path]) -> str:
    """Return the report of a run, or of several side by side, as one HTML file without anything from elsewhere.

    Args:
        directories: Output directories of commands, at least one.

    Raises:
        UsageError: one holds nothing to report.
        RefusedInputError: a file is damaged or of another version.
    """
    places = list(dict.fromkeys(str(directory) for directory in directories))
    pages = {place: read_page(Path(place)) for place in places}
    if len(places) == 1:
        return html(pages[places[0]])
    return html(replace(comparison_page(pages), command=comparison_command(places)))


def write_html(directory: Path) -> Path:
    """Write `report.html` beside the files of a run, from these files, and return its path.

    Raises:
        ShardwrightError: the system refuses to write.
    """
    (path,) = write_files({REPORT_FILE: report_html([directory])}, directory, force=True)
    return path


def check_report(findings: Mapping[str, Any], *, command: str) -> str:
    """Return the report of what `check --format json` prints."""
    from ...plugins.planning.from_names import installed_versions

    return html(check_page({**findings, "command": command, "versions": dict(installed_versions())}))
