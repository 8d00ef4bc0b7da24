"""Result of a rehearsal, and its JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...ds_configs.plan.output import write_files
from ...ds_configs.plan.plan import Plan
from ...ds_configs.shrink.config import Change
from .checks import Check

SCHEMA_VERSION = 1
"""Version of `rehearsal.json` and of `rehearse --format json`."""
REPORT_FILE = "rehearsal.json"
ROLES = ("weights", "gradients", "optimizer", "activations", "buckets", "other")
PHASES = ("loss", "backward", "step")

OFFLOADED = "offloaded_checkpoints"
"""Term of layer inputs that wait in host memory."""

RoleBytes = Mapping[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedPhase:
    """Predicted tensor bytes of one phase on one CPU rank."""

    terms: Mapping[str, int]
    """Bytes by the plan's term names."""
    roles: RoleBytes
    """The same bytes by role."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Rehearsal:
    plan: Plan
    source: str | None
    """Directory of the plan; `None` for a plan without files."""
    ranks: int
    steps: int
    checks: tuple[Check, ...]
    changes: tuple[Change, ...] = ()
    """Values that differ from the plan's."""
    losses: tuple[float, ...] = ()
    """Loss of each step, mean over the ranks."""
    measured: Mapping[str, RoleBytes] | None = None
    """Bytes by phase and role on the fullest rank; `None` when training was not reached."""
    predicted: Mapping[str, PredictedPhase] | None = None
    """Prediction of the plan's formulas for the same sizes; `None` when training was not reached."""
    host: Mapping[str, int] | None = None
    """Measured and predicted bytes of layer inputs in host memory on the fullest rank; `None` if none wait there."""
    seconds: float = 0.0
    files: tuple[str, ...] = ()
    """Paths of the written files."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the libraries that ran, by name."""
    command: str = ""
    """Command line of the rehearsal; empty when a Python program started it."""

    def __repr__(self) -> str:
        verdict = "passed" if self.failure is None else f"failed at {self.failure.name}"
        return f"<Rehearsal of {self.plan.model.name}, {self.plan.chosen.layout.label}, {self.ranks} ranks: {verdict}>"

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def failure(self) -> Check | None:
        return next((check for check in self.checks if check.passed is False), None)

    @property
    def exit_code(self) -> int:
        """0 when passed, 2 for an error in the files, 1 for a failure at run time."""
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
                "layout": plan.chosen.layout.label,
                "method": plan.job.method,
                "precision": plan.job.precision,
            },
            "ranks": self.ranks,
            "steps": self.steps,
            "changes": [asdict(change) for change in self.changes],
            "losses": list(self.losses),
            "measured": {phase: dict(roles) for phase, roles in (self.measured or {}).items()},
            "predicted": {phase: {**part.roles, "terms": dict(part.terms)} for phase, part in predicted.items()},
            "host": None if self.host is None else dict(self.host),
            "files": list(self.files),
            "seconds": round(self.seconds, 1),
            "versions": dict(self.versions),
            "command": self.command,
        }


def write_report(rehearsal: Rehearsal, directory: Path) -> None:
    """Write `rehearsal.json`.

    Raises:
        ShardwrightError: the file cannot be written.
    """
    write_files({REPORT_FILE: json.dumps(rehearsal.to_dict(), indent=2) + "\n"}, directory, force=True)
