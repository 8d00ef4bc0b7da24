"""Outcome of a launched training: its JSON, report, model card and notebook view."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...ds_configs.plan.plan import Plan
from ...plugins.huggingface_hub import CARD_FILE
from ..counting.counts import Estimate, exponential
from ..data.samples import SampleStatistics
from ..reports.make import TRAINING_FILE
from ..reports.markdown import markdown, table
from ..reports.report import perplexity, with_error
from ..reports.runs import training_report
from .settings import METRICS_FILE, REPORT_FILE, LaunchedSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """Measurements of the ranks' steps; the content of `result.json`."""

    steps: int
    """Optimizer steps of the run."""
    step_seconds: float
    """Seconds of these steps; after a resume, of the steps since then, or of the logged ones if there are none."""
    tokens: int
    """Tokens trained on, without padding."""
    timed_tokens: int
    """Tokens of the steps that `step_seconds` counts."""
    peak_bytes: int | None
    """Largest allocation on any accelerator, evaluation included; `None` on CPU ranks."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all ranks per second of training steps."""
        return self.timed_tokens / self.step_seconds if self.step_seconds else 0.0


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class LaunchedOutcome(ABC):
    plan: Plan
    statistics: SampleStatistics
    """Samples that were trained and evaluated on."""
    metrics: Sequence[Mapping[str, float]]
    """The logged steps."""
    seconds: float
    """Wall-clock seconds from the launch to the report."""
    settings: LaunchedSettings
    result: StepResult

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as JSON values."""

    @abstractmethod
    def measures(self) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        """Return the results on the held-out samples: headings, and rows of a name and values."""

    @abstractmethod
    def card(self) -> str:
        """Return the model card, with the metadata that the Hub reads."""

    def __repr__(self) -> str:
        headings, rows = self.measures()
        measures = ", ".join(f"{name} {value}" for name, value in zip(headings[1:], rows[0][1:], strict=True) if value)
        layout = f"{self.plan.chosen.layout.label} on {self.plan.hardware.name}"
        return f"<{type(self).__name__} of {self.statistics.source}, {layout}: {rows[0][0]}: {measures}>"

    def where_and_what(self) -> dict[str, Any]:
        return {
            "layout": self.plan.chosen.layout.label,
            "hardware": self.plan.hardware.name,
            "settings": self.settings.model_dump(),
            "dataset": asdict(self.statistics),
        }

    def speed(self) -> dict[str, Any]:
        return {
            "steps": self.result.steps,
            "tokens": self.result.tokens,
            "tokens_per_second": round(self.result.tokens_per_second, 1),
            "seconds": round(self.seconds, 1),
        }

    def speed_line(self) -> str:
        return (
            f"{self.result.steps} steps, {self.result.tokens:,} tokens, {self.result.tokens_per_second:,.0f} tokens/s, "
            f"{self.seconds:.0f} s total"
        )

    def files(self, kind: str, command: str = "") -> dict[str, str | bytes]:
        """Return report, figures and model card by name; `command` is the command line."""
        data = self.to_dict()
        # The default learning rate depends on the method; the report shows the one that ran.
        data["settings"] = data["settings"] | {"learning_rate": self.settings.base_learning_rate()}
        headings, rows = self.measures()
        data |= {"kind": kind, "versions": dict(self.plan.versions), "command": command}
        data |= {"measures": {"headings": list(headings), "rows": [list(row) for row in rows]}}
        data |= {"result": asdict(self.result)}
        report = training_report(data, self.metrics, self.plan)
        return {
            REPORT_FILE: markdown(report),
            CARD_FILE: self.card(),
            TRAINING_FILE: json.dumps(data, indent=2) + "\n",
        }

    def card_results(self) -> list[str]:
        """Return the blocks of a model card about the held-out samples and the steps."""
        return [
            f"On {self.statistics.evaluation_samples} held-out samples of the same dataset:",
            table(*self.measures()),
            f"{self.result.steps} optimizer steps, {self.result.tokens:,} tokens, sequences of {self.settings.seq_len} "
            f"tokens; the settings are in [REPORT.md](REPORT.md), every logged step in [metrics.jsonl](metrics.jsonl).",
        ]


def number(value: float) -> str:
    return f"{value:.4f}"


def with_spread(shape: Callable[[float], str], mean: Estimate) -> str:
    """Return a mean, formatted by `shape`, with its standard error."""
    return with_error(mean.value, mean.standard_error, shape)


def with_spreads(loss: Estimate | None) -> tuple[str, str]:
    """Return a mean loss and its perplexity, each with its standard error."""
    if loss is None:
        return "not measured", "not measured"
    error = exponential(loss).standard_error
    return with_spread(number, loss), with_spread(perplexity, Estimate(value=loss.value, standard_error=error))


def read_metrics(directory: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (directory / METRICS_FILE).read_text(encoding="utf-8").splitlines()]
