"""JSON answers of the commands that other programs read; `shardwright schema` prints their schemas.

Only keys that keep their meaning are declared. An answer may have more.
"""

from __future__ import annotations

from typing import Any, NotRequired

from typing_extensions import TypedDict


class Memory(TypedDict):
    """Memory of one accelerator, in bytes."""

    peak_bytes: int
    low_bytes: int
    high_bytes: int
    """Upper end of the prediction; a layout fits if it is at most `capacity_bytes`."""
    capacity_bytes: int
    phase: str
    terms: dict[str, int]


class StepTime(TypedDict):
    """Prediction of an optimizer step."""

    seconds: float
    low_seconds: float
    high_seconds: float
    tokens_per_second: float
    terms: dict[str, float]


class Candidate(TypedDict):
    """A layout, with its reason."""

    layout: dict[str, Any]
    reason: str
    gpu_memory: Memory
    step_time: StepTime


class PlanAnswer(TypedDict):
    """Answer of `plan`, also if nothing fits."""

    schema_version: int
    model: dict[str, Any]
    hardware: dict[str, Any]
    job: dict[str, Any]
    chosen: Candidate | None
    """`None` if nothing fits."""
    rejected: list[Candidate]
    would_fit: NotRequired[list[dict[str, Any]]]
    """Changes after which a layout fits, if none does."""


class Finding(TypedDict):
    """An error or a warning in a file."""

    kind: str
    where: str
    """File, line and key."""
    value: Any
    rule: str
    fix: str
    message: str


class CheckAnswer(TypedDict):
    """Answer of `check`."""

    schema_version: int
    errors: int
    findings: list[Finding]
    files: list[str]


class Evidence(TypedDict):
    """Line of a log that shows the cause."""

    line: int
    rank: int | None
    text: str
    frame: str


class ExplainErrorAnswer(TypedDict):
    """Answer of `explain --error LOG`."""

    schema_version: int
    cause: str
    meaning: str
    evidence: Evidence
    fix: list[str]
    command: str
    others: list[dict[str, Any]]
    plans: str


ANSWERS = {"plan-answer": PlanAnswer, "check-answer": CheckAnswer, "error-answer": ExplainErrorAnswer}
