"""Report of a rehearsal: JSON, and a chart of measured beside predicted memory."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...ds_configs.plan.notebook import result_html
from ...ds_configs.plan.output import output_faults
from ...ds_configs.plan.plan import Plan
from ...ds_configs.plan.write import write_files
from ...ds_configs.shrink.config import Change
from ...ds_configs.specs.errors import UsageError
from .checks import Check

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEMA_VERSION = 1
"""Version of `rehearsal.json` and of `rehearse --format json`."""
REPORT_FILE, CHART_FILE = OWN_FILES = "rehearsal.json", "rehearsal.png"
ROLES = ("weights", "gradients", "optimizer", "activations", "buckets", "other")
PHASES = ("loss", "backward", "step")
_COLOURS = ("#4477aa", "#228833", "#ccbb44", "#ee6677", "#66ccee", "#bbbbbb")

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
    """Return the report's files by name; without measurements there is no chart."""
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


def memory_chart(rehearsal: Rehearsal) -> bytes:
    """Return a PNG with two stacked bars for each phase: measured and predicted bytes by role."""
    output = io.BytesIO()
    memory_figure(rehearsal).savefig(output, format="png", dpi=120)
    return output.getvalue()


def memory_figure(rehearsal: Rehearsal) -> Figure:
    """Return the chart; bars are in MB, measured ones plain and predicted ones hatched."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    measured = rehearsal.measured or {}
    predicted = {phase: found.roles for phase, found in (rehearsal.predicted or {}).items()}
    phases = [phase for phase in PHASES if phase in measured or phase in predicted]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for offset, source, hatch in ((-0.2, measured, ""), (0.2, predicted, "//")):
        bottoms = [0.0] * len(phases)
        for role, colour in zip(ROLES, _COLOURS, strict=True):
            heights = [source.get(phase, {}).get(role, 0) / 1e6 for phase in phases]
            positions = [index + offset for index in range(len(phases))]
            style: dict[str, Any] = {"color": colour, "hatch": hatch, "edgecolor": "white", "width": 0.38}
            axes.bar(positions, heights, bottom=bottoms, label=None if hatch else role, **style)
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.set_xticks(range(len(phases)), phases)
    axes.set_ylabel("MB of tensors on the fullest rank")
    label = rehearsal.plan.chosen.strategy.label
    axes.set_title(f"{label} on {rehearsal.ranks} CPU ranks: measured (left), predicted (right)", fontsize=10)
    figure.legend(loc="outside right upper", fontsize=8)
    return figure
