"""Page of a check."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .page import Page, Section, Table, Tile
from .words import plain


def check_page(data: Mapping[str, Any]) -> Page:
    """Return the report of what `check --format json` prints, with `command` and `versions` beside it."""
    findings = sorted(data["findings"], key=lambda finding: finding["kind"] != "error")
    errors = data["errors"]
    warnings = len(findings) - errors
    headings = ("kind", "place", "value", "rule", "way out")
    found = [
        (finding["kind"], finding["where"], plain(finding["value"])[:200], finding["rule"], plain(finding["fix"]))
        for finding in findings
    ]
    files = Table(headings=("file",), rows=[(name,) for name in data["files"]], figures=False)
    shown = Section(heading="Findings", tables=(Table(headings=headings, rows=found, figures=False),))
    return Page(
        kind="Check",
        title=", ".join(data["files"][:3]) + (" and more" if len(data["files"]) > 3 else ""),
        subtitle="DeepSpeed and Accelerate configuration",
        tiles=(
            Tile(label="Errors", value=str(errors), state="bad" if errors else "good"),
            Tile(label="Warnings", value=str(warnings)),
            Tile(label="Files", value=str(len(data["files"]))),
        ),
        sections=((shown,) if found else (Section(heading="Findings", texts=("Nothing was found wrong.",)),))
        + (Section(heading="Files that were read", tables=(files,)),),
        command=data.get("command", ""),
        versions=data.get("versions", {}),
    )
