"""Collects findings about one file and answers questions about its values by dotted key path."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from ..specs.errors import Fault
from .tree import Node, Problem

MAXIMUM_FINDINGS = 200
"""Findings beyond this are not listed: the file is no configuration, or one cause explains them all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One violated rule and how bad it is."""

    kind: Literal["error", "warning"]
    """`error`: the run stops or disobeys the file; `warning`: a key has no or a surprising effect."""
    fault: Fault
    """Place, value, rule and way out."""

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as JSON values."""
        fault = self.fault
        return {
            "kind": self.kind,
            "where": fault.where,
            "value": _json_value(fault.value),
            "rule": fault.rule,
            "fix": fault.fix,
            "message": str(fault),
        }


def _json_value(value: object) -> object:
    if isinstance(value, dict):
        return {str(key): _json_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_json_value(item) for item in value]
    if isinstance(value, float):
        return value if value - value == 0 else str(value)
    return value if isinstance(value, bool | int | str) or value is None else str(value)


class Report:
    """Findings about one parsed file, each with the file, line and key path."""

    def __init__(self, root: Node, filename: str) -> None:
        self.root = root
        self.filename = filename
        self.findings: list[Finding] = []

    def node(self, path: str) -> Node | None:
        """Return the node at a dotted path, or `None`."""
        node: Node | None = self.root
        for key in path.split(".") if path else ():
            node = node.get(key) if node is not None else None
        return node

    def has(self, path: str) -> bool:
        """Say whether the key is present, whatever its value."""
        return self.node(path) is not None

    def value(self, path: str) -> object:
        """Return the scalar at the path; `None` when absent or not a scalar."""
        node = self.node(path)
        return node.scalar if node is not None else None

    def integer(self, path: str) -> int | None:
        """Return an integral number at the path; `None` for anything else."""
        return as_integer(self.value(path))

    def number(self, path: str) -> float | None:
        """Return a number at the path; `None` for anything else."""
        value = self.value(path)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    def text(self, path: str) -> str | None:
        """Return a string at the path; `None` for anything else."""
        value = self.value(path)
        return value if isinstance(value, str) else None

    def true(self, path: str) -> bool:
        """Say whether the value is the boolean `true`."""
        return self.value(path) is True

    def line(self, path: str) -> int:
        """Return the line of the deepest existing part of the path."""
        node, line = self.root, self.root.line
        for key in path.split(".") if path else ():
            entry = next((entry for entry in node.entries if entry.key == key), None)
            if entry is None:
                break
            node, line = entry.node, entry.line
        return line

    def error(self, path: str, rule: str, fix: str = "", *, value: object = None, line: int = 0) -> None:
        """Record a fault that must be repaired."""
        self._add("error", path, rule, fix, value, line)

    def warning(self, path: str, rule: str, fix: str = "", *, value: object = None, line: int = 0) -> None:
        """Record a value that does not do what it says."""
        self._add("warning", path, rule, fix, value, line)

    def _add(self, kind: Literal["error", "warning"], path: str, rule: str, fix: str, value: object, line: int) -> None:
        shown = self.value(path) if value is None else value
        where = f"{self.filename}:{line or self.line(path)} {printable_key(path)}".rstrip()
        self.findings.append(Finding(kind=kind, fault=Fault(where=where, value=shown, rule=rule, fix=fix)))


def printable_key(text: str, longest: int = 200) -> str:
    """Return a key path on one line that any terminal can show."""
    shown = "".join(character if character.isprintable() else repr(character)[1:-1] for character in text[:longest])
    return shown + "..." * (len(text) > longest)


def as_integer(value: object) -> int | None:
    """Return `value` when it is a number without a fraction, such as 5e8."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if math.isfinite(value) and value == int(value) else None


def from_problem(problem: Problem, filename: str) -> Finding:
    """Turn a problem of the syntax into a finding."""
    where = f"{filename}:{problem.line} {printable_key(problem.key)}".rstrip()
    fault = Fault(where=where, value=problem.value, rule=problem.rule, fix=problem.fix)
    return Finding(kind="warning" if problem.warning else "error", fault=fault)


def in_order(findings: list[Finding], filename: str) -> tuple[Finding, ...]:
    """Sort findings by line and cut them off where nobody would read on."""
    ordered = sorted(findings, key=line_of)
    if len(ordered) <= MAXIMUM_FINDINGS:
        return tuple(ordered)
    rule = f"has more than {MAXIMUM_FINDINGS} faults; the others are not listed"
    return (*ordered[:MAXIMUM_FINDINGS], Finding(kind="error", fault=Fault(where=filename, rule=rule)))


def line_of(finding: Finding) -> int:
    """Return the line in a finding's place, for sorting."""
    line = finding.fault.where.rsplit(" ", 1)[0].rsplit(":", 1)[-1]
    return int(line) if line.isdigit() else 0
