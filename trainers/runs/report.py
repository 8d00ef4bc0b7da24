"""Report and model card of a launched training: the values that all of them share."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...ds_configs.plan.notebook import result_html
from ...ds_configs.plan.plan import Plan
from ...plugins.huggingface_hub.cards import Relation, license_of, model_card, shown_name, title_of
from ..data.samples import SampleStatistics
from ..evaluation.estimates import Estimate, exponential
from ..formats.rendering import render
from .settings import METRICS_FILE, LaunchedSettings

REPORT_FILE = "REPORT.md"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """Measurements of the ranks' steps, as they stand in `result.json`."""

    steps: int
    """Optimizer steps of the whole training."""
    step_seconds: float
    """Seconds inside these steps; after resuming, of the steps since."""
    tokens: int
    """Tokens trained on, without padding."""
    timed_tokens: int
    """Those of the steps that `step_seconds` counts."""
    peak_bytes: int | None
    """Largest allocation on any accelerator, evaluation included; `None` on CPU ranks."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all ranks for each second of training steps."""
        return self.timed_tokens / self.step_seconds if self.step_seconds else 0.0


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class LaunchedOutcome(ABC):
    """A training that ended well."""

    plan: Plan
    """Where everything went."""
    statistics: SampleStatistics
    """What was trained on."""
    metrics: Sequence[Mapping[str, float]]
    """The logged steps."""
    seconds: float
    """Wall-clock seconds from the launch to the report."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as JSON values."""

    @abstractmethod
    def measures(self) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        """Return what was measured on the held-out samples: headings, and rows of a name and values."""

    def __repr__(self) -> str:
        """Return what ran where and what its first measure came to, in one line."""
        headings, rows = self.measures()
        found = ", ".join(f"{name} {value}" for name, value in zip(headings[1:], rows[0][1:], strict=True) if value)
        layout = f"{self.plan.chosen.strategy.label} on {self.plan.hardware.name}"
        return f"<{type(self).__name__} of {self.statistics.source}, {layout}: {rows[0][0]}: {found}>"

    def _repr_html_(self) -> str:
        """Return the outcome as a notebook shows it."""
        headings, rows = self.measures()
        line = f"{self.statistics.source}, {self.plan.chosen.strategy.label} on {self.plan.hardware.name}"
        return result_html(line, headings, rows, f"{self.seconds:.0f} s in all")

    def where_and_what(self, settings: LaunchedSettings) -> dict[str, Any]:
        """Return layout, settings and data as JSON values."""
        return {
            "strategy": self.plan.chosen.strategy.label,
            "hardware": self.plan.hardware.name,
            "settings": settings.model_dump(),
            "dataset": asdict(self.statistics),
        }

    def figures(self, kind: str, result: Mapping[str, Any], command: str) -> str:
        """Return `report.json`, which `report.html` is made from: the outcome, its table, and what made it."""
        headings, rows = self.measures()
        timed = {name: result[name] for name in ("step_seconds", "timed_tokens", "peak_bytes")}
        shown = {"headings": list(headings), "rows": [list(row) for row in rows]}
        made = {"kind": kind, "versions": dict(self.plan.versions), "command": command}
        return json.dumps(self.to_dict() | made | {"measures": shown, "result": timed}, indent=2) + "\n"

    def speed(self, result: StepResult) -> dict[str, Any]:
        """Return steps, tokens and seconds as JSON values."""
        return {
            "steps": result.steps,
            "tokens": result.tokens,
            "tokens_per_second": round(result.tokens_per_second, 1),
            "seconds": round(self.seconds, 1),
        }

    def speed_line(self, result: StepResult) -> str:
        """Return what the steps took, for a terminal."""
        return (
            f"{result.steps} steps, {result.tokens:,} tokens, {result.tokens_per_second:,.0f} tokens/s, "
            f"{self.seconds:.0f} s in all"
        )


def number(value: float) -> str:
    """Return nats with four decimals."""
    return f"{value:.4f}"


def perplexity(nats: float) -> str:
    """Return ``exp(cross-entropy)``."""
    return f"{math.exp(min(nats, 700)):.4g}"


def with_spread(shape: Callable[[float], str], found: Estimate) -> str:
    """Return what a shape makes of a mean, with its standard error."""
    error = found.standard_error
    return shape(found.value) if error is None else f"{shape(found.value)} ± {float(f'{error:.2g}'):,g}"


def with_spreads(loss: Estimate) -> tuple[str, str]:
    """Return a mean loss and its perplexity, each with its standard error."""
    error = exponential(loss).standard_error
    return with_spread(number, loss), with_spread(perplexity, Estimate(value=loss.value, standard_error=error))


def read_metrics(directory: Path) -> list[dict[str, float]]:
    """Return the logged steps of a run."""
    return [json.loads(line) for line in (directory / METRICS_FILE).read_text(encoding="utf-8").splitlines()]


def report_text(template: str, outcome: LaunchedOutcome, settings: Mapping[str, Any], **values: Any) -> str:
    """Return `REPORT.md` from a room's template, which includes the sections of `runs/templates/run.md.j2`."""
    counts = asdict(outcome.statistics)
    machines = counts.pop("machines")
    data = [
        (name.replace("_", " "), f"{value:,}" if isinstance(value, int) else value) for name, value in counts.items()
    ]
    if machines > 1:
        data.append(("machines", f"{machines:,}, each with a part of its own; the counts are of the first one's"))
    return render(template, outcome=outcome, settings=settings, data=data, **values)


def card_text(template: str, base: str, relation: Relation, library: str, tags: Sequence[str], **values: Any) -> str:
    """Return `README.md` from a room's template, with the metadata that the Hub reads.

    Args:
        template: Its path below `trainers/`.
        base: Hub id or path of the model that the weights come from.
        relation: How they came from it.
        library: That loads them.
        tags: What the Hub finds the model by.
        values: Of the template; `others` and `task` are those of `model_card`.
    """
    stated = {name: values[name] for name in ("others", "task") if name in values}
    text = render(template, name=shown_name, title=title_of, license=license_of, **values)
    return model_card(text, base=base, relation=relation, library=library, tags=(*tags, "shardwright"), **stated)
