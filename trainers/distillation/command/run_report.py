"""Files of a distillation: `REPORT.md`, the student's model card, and the chart of its training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ....plugins.huggingface_hub.cards import CARD_FILE
from ...charts import steps
from ...charts.canvas import panels, png
from ...evaluation.estimates import STANDARD_ERROR, Estimate
from ...formats.rendering import table
from ...runs.report import (
    REPORT_FILE,
    LaunchedOutcome,
    StepResult,
    card_text,
    number,
    report_text,
    with_spread,
    with_spreads,
)
from ...runs.settings import METRICS_FILE
from .run_files import DistillSettings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEMA_VERSION = 1
"""Version of `distill --format json`."""
CHART_FILE = "distillation.png"
_TEMPLATES = "distillation/command/templates"
_TAUGHT = "teacher_cross_entropy"
_FORMULAS = {
    "forward_kl": "KL(teacher | student)",
    "reverse_kl": "KL(student | teacher)",
    "jsd": "JSD(teacher, student)",
    "skewed_kl": "KL(teacher | λ teacher + (1 - λ) student)",
    "skewed_reverse_kl": "KL(student | (1 - λ) teacher + λ student)",
    "total_variation": "½ Σ |teacher - student|",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillationResult(StepResult):
    """Measurements of the ranks, as they stand in `result.json`."""

    before: Mapping[str, float]
    """Metrics of the student on the held-out samples before its first step, and standard errors of those that are means
    over tokens."""
    after: Mapping[str, float]
    """The same after its last step."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class DistillationOutcome(LaunchedOutcome):
    """A distillation that ended well."""

    settings: DistillSettings
    """What was asked for."""
    teacher: str
    """Hub id or directory of the teacher."""
    student: str
    """Hub id, directory or `config.json` that the student started from."""
    result: DistillationResult
    """What was measured."""

    def measures(self) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        """Return the measures of the student before and after, and of the teacher."""
        rows = [(row.name, row.before, row.after, row.teacher) for row in comparison(self.result)]
        return ("", "student before", "student after", "teacher"), rows

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as JSON values."""
        return {
            "schema_version": SCHEMA_VERSION,
            "teacher": self.teacher,
            "student": self.student,
            **self.where_and_what(self.settings),
            "before": dict(self.result.before),
            "after": dict(self.result.after),
            "cross_entropy_standard_error": {
                when: _mean(metrics, _task(self.result)).standard_error
                for when, metrics in (("before", self.result.before), ("after", self.result.after))
            },
            **self.speed(self.result),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class TableRow:
    """One measure on the held-out samples."""

    name: str
    """What is measured."""
    before: str
    """The student before."""
    after: str
    """The student after."""
    teacher: str
    """The teacher; empty where it makes no sense."""


def comparison(result: DistillationResult) -> list[TableRow]:
    """Return the measures of the student before and after, and of the teacher."""
    before, after, task = result.before, result.after, _task(result)
    taught = with_spreads(_mean(after, _TAUGHT)) if _TAUGHT in after else ("", "")
    names = ("cross-entropy, nats a token", "perplexity")
    stages = (with_spreads(_mean(before, task)), with_spreads(_mean(after, task)), taught)
    rows = [
        TableRow(name=row[0], before=row[1], after=row[2], teacher=row[3]) for row in zip(names, *stages, strict=True)
    ]
    for key, name, shape, own in (
        ("kl_per_token", "KL(teacher | student), nats a token", partial(with_spread, number), "0"),
        ("top1_agreement", "same most likely token as the teacher", _share, "100 %"),
        ("speculative_acceptance", "expected speculative acceptance", _share, "100 %"),
    ):
        if key in after:
            values = {"before": shape(_mean(before, key)), "after": shape(_mean(after, key))}
            rows.append(TableRow(name=name, teacher=own, **values))
    return rows


def _task(result: DistillationResult) -> str:
    return "student_cross_entropy" if "student_cross_entropy" in result.after else "loss"


def _mean(metrics: Mapping[str, float], name: str) -> Estimate:
    return Estimate(value=metrics[name], standard_error=metrics.get(f"{name}_{STANDARD_ERROR}"))


def _share(found: Estimate) -> str:
    error = "" if found.standard_error is None else f" ± {100 * found.standard_error:.2g}"
    return f"{100 * found.value:.1f}{error} %"


def distillation_file_names(settings: DistillSettings) -> tuple[str, ...]:
    """Return the names of the files that a run leaves in its output directory, beside the plan's."""
    weights = "adapter_model.safetensors" if settings.method == "lora" else "model.safetensors"
    config = "adapter_config.json" if settings.method == "lora" else "config.json"
    return (CARD_FILE, REPORT_FILE, CHART_FILE, METRICS_FILE, config, weights, "tokenizer.json")


def distillation_files(outcome: DistillationOutcome) -> dict[str, str | bytes]:
    """Return the report, the model card and the chart by name."""
    return {
        REPORT_FILE: distillation_report(outcome),
        CARD_FILE: distillation_card(outcome),
        CHART_FILE: png(distillation_figure(outcome.metrics)),
    }


def distillation_report(outcome: DistillationOutcome) -> str:
    """Return `REPORT.md`."""
    settings = outcome.settings.model_dump() | {"learning_rate": outcome.settings.base_learning_rate()}
    return report_text(f"{_TEMPLATES}/report.md.j2", outcome, settings, measures=_comparison_table(outcome.result))


def distillation_card(outcome: DistillationOutcome) -> str:
    """Return the student's `README.md`, with the metadata that the Hub reads."""
    adapter = outcome.settings.method == "lora"
    return card_text(
        f"{_TEMPLATES}/card.md.j2",
        outcome.student,
        "adapter" if adapter else "finetune",
        "peft" if adapter else "transformers",
        ("distillation",),
        outcome=outcome,
        others=(outcome.teacher,),
        objective=objective_sentence(outcome.settings),
        measures=_comparison_table(outcome.result),
        adapter="whole" if adapter else None,
    )


def objective_sentence(settings: DistillSettings) -> str:
    """Return the loss that a run minimises, in one line."""
    alpha, tau = settings.alpha, settings.temperature
    parts = [f"{1 - alpha:g} · cross-entropy"] if alpha < 1 else []
    scale = f"{alpha:g}" + ("" if tau == 1 else f" · {tau:g}²")
    parts += [f"{scale} · {_FORMULAS[settings.loss]}" + ("" if tau == 1 else f" at τ = {tau:g}")] if alpha else []
    parts += [f"{settings.hidden_states:g} · hidden states"] if settings.hidden_states else []
    parts += [f"{settings.attention:g} · attention relations"] if settings.attention else []
    share = f", {settings.on_policy:.0%} of the batches completed by the student" if settings.on_policy else ""
    return f"{' + '.join(parts)}, the mean over all labelled tokens{share}."


def _comparison_table(result: DistillationResult) -> str:
    rows = [(row.name, row.before, row.after, row.teacher) for row in comparison(result)]
    return table(("", "student before", "student after", "teacher"), rows)


def distillation_figure(metrics: Sequence[Mapping[str, float]]) -> Figure:
    """Return the chart: what is minimised and measured in nats on the left, agreement on the right."""
    return panels(steps.loss_chart(metrics), steps.share_chart(metrics))
