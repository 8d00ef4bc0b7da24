"""Files of a training: `REPORT.md`, the model card, and the chart of its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...plugins.huggingface_hub.cards import CARD_FILE
from ..charts import steps
from ..charts.canvas import panels, png
from ..evaluation.estimates import Estimate
from ..formats.rendering import table
from ..runs.report import (
    REPORT_FILE,
    LaunchedOutcome,
    StepResult,
    card_text,
    report_text,
    with_spreads,
)
from ..runs.settings import METRICS_FILE
from .settings import TrainSettings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEMA_VERSION = 1
"""Version of `train --format json`."""
CHART_FILE = "training.png"
_TEMPLATES = "training/templates"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult(StepResult):
    """Measurements of the ranks, as they stand in `result.json`."""

    before: float | None
    """Cross-entropy on the held-out samples before the first step, in nats a token; `None` where it cannot be measured,
    which is under context parallelism."""
    after: float | None
    """The same after the last step."""
    before_standard_error: float | None
    """Of `before`, over samples; `None` where ranks share samples, and with a single one."""
    after_standard_error: float | None
    """Of `after`, likewise."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class TrainOutcome(LaunchedOutcome):
    """A training that ended well."""

    settings: TrainSettings
    """What was asked for."""
    model: str
    """Hub id, directory or `config.json` that training started from."""
    result: TrainResult
    """What was measured."""

    def measures(self) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        """Return the measures on the held-out samples, before and after."""
        return ("", "before", "after"), measures(self.result)

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as JSON values."""
        return {
            "schema_version": SCHEMA_VERSION,
            "model": self.model,
            **self.where_and_what(self.settings),
            "cross_entropy": {"before": self.result.before, "after": self.result.after},
            "cross_entropy_standard_error": {
                "before": self.result.before_standard_error,
                "after": self.result.after_standard_error,
            },
            **self.speed(self.result),
        }


def measures(result: TrainResult) -> list[tuple[str, str, str]]:
    """Return the measures on the held-out samples by name, before and after."""
    if result.before is None or result.after is None:
        return [("cross-entropy, nats a token", "not measured", "not measured")]
    before = Estimate(value=result.before, standard_error=result.before_standard_error)
    after = Estimate(value=result.after, standard_error=result.after_standard_error)
    names = ("cross-entropy, nats a token", "perplexity")
    return list(zip(names, with_spreads(before), with_spreads(after), strict=True))


def train_file_names(settings: TrainSettings) -> tuple[str, ...]:
    """Return the names of the files that a run leaves in its output directory, beside the plan's."""
    adapter = settings.method != "full"
    weights = "adapter_model.safetensors" if adapter else "model.safetensors"
    config = "adapter_config.json" if adapter else "config.json"
    return (CARD_FILE, REPORT_FILE, CHART_FILE, METRICS_FILE, config, weights, "tokenizer.json")


def train_files(outcome: TrainOutcome) -> dict[str, str | bytes]:
    """Return the report, the model card and the chart by name."""
    shown = table(("", "before", "after"), measures(outcome.result))
    settings = outcome.settings.model_dump() | {"learning_rate": outcome.settings.base_learning_rate()}
    adapter = outcome.settings.method != "full"
    card = card_text(
        f"{_TEMPLATES}/card.md.j2",
        outcome.model,
        "adapter" if adapter else "finetune",
        "peft" if adapter else "transformers",
        (),
        outcome=outcome,
        measures=shown,
        adapter="whole" if adapter else None,
    )
    return {
        REPORT_FILE: report_text(f"{_TEMPLATES}/report.md.j2", outcome, settings, measures=shown),
        CARD_FILE: card,
        CHART_FILE: png(train_figure(outcome.metrics)),
    }


def train_figure(metrics: Sequence[Mapping[str, float]]) -> Figure:
    """Return the chart: the loss of every logged step on the left, its learning rate on the right."""
    return panels(steps.loss_chart(metrics), steps.rate_chart(metrics))
