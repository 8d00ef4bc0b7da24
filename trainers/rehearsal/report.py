"""Report of a rehearsal: JSON, and a chart of measured beside predicted memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...ds_configs.plan.notebook import result_html
from ...ds_configs.plan.output import output_faults
from ...ds_configs.plan.plan import Plan
from ...ds_configs.plan.write import write_files
from ...ds_configs.shrink.config import Change
from ...ds_configs.specs.errors import UsageError
from ..charts.canvas import panels, png
from ..charts.kinds import stacks
from ..reports.make import REPORT_FILE as HTML_FILE
from ..reports.make import write_html
from ..reports.rehearsed import memory_bars
from .checks import Check

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEMA_VERSION = 1
"""Version of `rehearsal.json` and of `rehearse --format json`."""
REPORT_FILE, CHART_FILE = "rehearsal.json", "rehearsal.png"
OWN_FILES = (REPORT_FILE, CHART_FILE, HTML_FILE)
ROLES = ("weights", "gradients", "optimizer", "activations", "buckets", "other")
PHASES = ("loss", "backward", "step")

RoleBytes = Mapping[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedPhase:
    """Predicted tensor bytes of one phase on one CPU rank."""

    terms: Mapping[str, int]
    """Bytes by the plan's term names."""
    roles: RoleBytes
    """The same bytes by what they are for."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Rehearsal:
    """The outcome of a rehearsal."""

    plan: Plan
    """The plan that was rehearsed."""
    source: str | None
    """Its directory; `None` for a plan that lies nowhere."""
    ranks: int
    """CPU ranks that were started."""
    nodes: int
    """Launchers that they were started by."""
    steps: int
    """Optimizer steps."""
    checks: tuple[Check, ...]
    """Every check in its order."""
    changes: tuple[Change, ...] = ()
    """Values that differ from the plan's."""
    losses: tuple[float, ...] = ()
    """Loss of each step, mean over the ranks."""
    measured: Mapping[str, RoleBytes] | None = None
    """Bytes by phase and role on the fullest rank; `None` when training was not reached."""
    predicted: Mapping[str, PredictedPhase] | None = None
    """What the plan's formulas say for the same sizes; `None` when training was not reached."""
    seconds: float = 0.0
    """Wall-clock seconds."""
    files: tuple[str, ...] = ()
    """Paths of what was written."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Libraries that ran, by name."""
    command: str = ""
    """Command line of the rehearsal; empty where a Python program asked for it."""

    def __repr__(self) -> str:
        """Return what was rehearsed and whether it passed, in one line."""
        verdict = "passed" if self.failure is None else f"failed at {self.failure.name}"
        return (
            f"<Rehearsal of {self.plan.model.name}, {self.plan.chosen.strategy.label}, {self.ranks} ranks: {verdict}>"
        )

    def _repr_html_(self) -> str:
        """Return the checks as a notebook shows them."""
        words = {True: "passed", False: "FAILED", None: "-"}
        rows = [(check.name, words[check.passed], check.detail) for check in self.checks]
        return result_html(repr(self).strip("<>"), ("check", "", "what was seen"), rows, f"{self.seconds:.0f} s")

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)

    @property
    def failure(self) -> Check | None:
        """The first check that failed."""
        return next((check for check in self.checks if check.passed is False), None)

    @property
    def exit_code(self) -> int:
        """0 when passed, 2 for a fault in the files, 1 for a failure at run time."""
        return self.failure.exit_code if self.failure is not None else 0

    def to_dict(self) -> dict[str, Any]:
        """Return the rehearsal as the JSON values of `rehearsal.json`."""
        plan, predicted = self.plan, self.predicted or {}
        return {
            "schema_version": SCHEMA_VERSION,
            "passed": self.passed,
            "checks": [check.to_dict() for check in self.checks],
            "plan": {
                "directory": self.source,
                "model": plan.model.name,
                "hardware": plan.hardware.name,
                "strategy": plan.chosen.strategy.label,
                "method": plan.job.method,
                "precision": plan.job.precision,
            },
            "ranks": self.ranks,
            "nodes": self.nodes,
            "steps": self.steps,
            "changes": [asdict(change) for change in self.changes],
            "losses": list(self.losses),
            "measured": {phase: dict(roles) for phase, roles in (self.measured or {}).items()},
            "predicted": {phase: {**found.roles, "terms": dict(found.terms)} for phase, found in predicted.items()},
            "files": list(self.files),
            "seconds": round(self.seconds, 1),
            "versions": dict(self.versions),
            "command": self.command,
        }


def check_output_directory(directory: Path, *, force: bool, model: str | None) -> None:
    """Refuse a directory that holds anything but an earlier rehearsal's two files, unless `force` is set.

    Args:
        directory: Where the report goes.
        force: Whether it may lie beside other files.
        model: The plan's model, where somebody named the directory; a plan may lie in its model's own.

    Raises:
        UsageError: it is a file, holds something else, or cannot be written.
    """
    fix = "use --force to write beside it"
    sources = {"the model": model}
    if faults := output_faults(directory, force=force, own=OWN_FILES, sources=sources, fix=fix):
        raise UsageError(faults)


def rehearsal_files(rehearsal: Rehearsal) -> dict[str, str | bytes]:
    """Return what the report is made from by name; without measurements there is no chart."""
    files: dict[str, str | bytes] = {REPORT_FILE: json.dumps(rehearsal.to_dict(), indent=2) + "\n"}
    if rehearsal.measured:
        files[CHART_FILE] = memory_chart(rehearsal)
    return files


def write_report(rehearsal: Rehearsal, directory: Path) -> None:
    """Write the report; the chart of an earlier rehearsal goes when this one has none.

    Raises:
        ShardwrightError: the system refuses to write.
    """
    files = rehearsal_files(rehearsal)
    write_files(files, directory, force=True)
    if CHART_FILE not in files:
        (directory / CHART_FILE).unlink(missing_ok=True)
    write_html(directory)


def memory_chart(rehearsal: Rehearsal) -> bytes:
    """Return a PNG with two stacked bars for each phase: measured and, hatched, predicted bytes by role."""
    return png(memory_figure(rehearsal))


def memory_figure(rehearsal: Rehearsal) -> Figure:
    """Return the chart; bars are in MB."""
    label = rehearsal.plan.chosen.strategy.label
    bars = memory_bars(rehearsal.to_dict())
    return panels(stacks(bars, f"MB of tensors, {label} on {rehearsal.ranks} CPU ranks"), width=8, height=4.5)
