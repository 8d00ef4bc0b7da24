"""Outcome and model card of a distillation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ....plugins.huggingface_hub import CARD_FILE, shown_name, title_of
from ...counting.counts import STANDARD_ERROR, Estimate
from ...reports.report import card_text, code, license_line, usage
from ...runs.run import LaunchedOutcome, StepResult, number, with_spread, with_spreads
from ...runs.settings import METRICS_FILE, REPORT_FILE
from .settings import DistillSettings

SCHEMA_VERSION = 1
"""Version of `distill --format json`."""
_FORMULAS = {
    "forward_kl": "KL(teacher | student)",
    "reverse_kl": "KL(student | teacher)",
    "jsd": "JSD(teacher, student)",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillationResult(StepResult):
    """Measurements of the ranks; the content of `result.json`."""

    before: Mapping[str, float]
    """Metrics of the student on the held-out samples before its first step, and standard errors of those that are means
    over tokens."""
    after: Mapping[str, float]
    """The same after its last step."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class DistillationOutcome(LaunchedOutcome):
    """Result of a distillation that succeeded."""

    settings: DistillSettings
    teacher: str
    student: str
    result: DistillationResult

    @property
    def _loss(self) -> str:
        return "student_cross_entropy" if "student_cross_entropy" in self.result.after else "loss"

    def measures(self) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        """Return the results of the student before and after, and of the teacher."""
        before, after = self.result.before, self.result.after
        teacher = "teacher_cross_entropy"
        losses = [
            with_spreads(_mean(before, self._loss)),
            with_spreads(_mean(after, self._loss)),
            with_spreads(_mean(after, teacher)) if teacher in after else ("", ""),
        ]
        rows = list(zip(("cross-entropy, nats per token", "perplexity"), *losses, strict=True))
        for key, name, shape, of_teacher in (
            ("kl_per_token", "KL(teacher | student), nats per token", partial(with_spread, number), "0"),
            ("top1_agreement", "same most likely token as the teacher", _share, "100 %"),
            ("speculative_acceptance", "expected speculative acceptance", _share, "100 %"),
        ):
            if key in after:
                rows.append((name, shape(_mean(before, key)), shape(_mean(after, key)), of_teacher))
        return ("", "student before", "student after", "teacher"), rows

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "teacher": self.teacher,
            "student": self.student,
            **self.where_and_what(),
            "before": dict(self.result.before),
            "after": dict(self.result.after),
            "cross_entropy_standard_error": {
                "before": _mean(self.result.before, self._loss).standard_error,
                "after": _mean(self.result.after, self._loss).standard_error,
            },
            **self.speed(),
        }

    def card(self) -> str:
        teacher, student, adapter = self.teacher, self.student, self.settings.method == "lora"
        lead = (
            f"{code(shown_name(student))} trained on {code(self.statistics.source_name)} with "
            f"{code(shown_name(teacher))} as its teacher: {objective_sentence(self.settings)}"
        )
        licenses = f"{license_line(student, 'Student')} {license_line(teacher, 'Teacher')}"
        return card_text(
            f"{title_of(student)}, distilled from {title_of(teacher)}",
            [lead, usage(adapter=adapter), *self.card_results()],
            f"{licenses} The terms of the teacher and of the data may also apply to the student. Read all three before "
            "you publish it.",
            base=student,
            relation="adapter" if adapter else "finetune",
            library="peft" if adapter else "transformers",
            tags=("distillation",),
            others=(teacher,),
        )


def _mean(metrics: Mapping[str, float], name: str) -> Estimate:
    return Estimate(value=metrics[name], standard_error=metrics.get(f"{name}_{STANDARD_ERROR}"))


def _share(mean: Estimate) -> str:
    error = "" if mean.standard_error is None else f" ± {100 * mean.standard_error:.2g}"
    return f"{100 * mean.value:.1f}{error} %"


def objective_sentence(settings: DistillSettings) -> str:
    """Return the loss that a run minimizes, in one line."""
    alpha, tau = settings.alpha, settings.temperature
    parts = [f"{1 - alpha:g} · cross-entropy"] if alpha < 1 else []
    scale = f"{alpha:g}" + ("" if tau == 1 else f" · {tau:g}²")
    parts += [f"{scale} · {_FORMULAS[settings.loss]}" + ("" if tau == 1 else f" at τ = {tau:g}")] if alpha else []
    parts += [f"{settings.hidden_states:g} · hidden states"] if settings.hidden_states else []
    parts += [f"{settings.attention:g} · attention relations"] if settings.attention else []
    share = f", {settings.on_policy:.0%} of the batches completed by the student" if settings.on_policy else ""
    return f"{' + '.join(parts)}, the mean over all labelled tokens{share}."


def distillation_file_names(settings: DistillSettings) -> tuple[str, ...]:
    """Return the files that a run writes into its output directory, in addition to the plan's."""
    adapter = settings.method == "lora"
    weights = "adapter_model.safetensors" if adapter else "model.safetensors"
    config = "adapter_config.json" if adapter else "config.json"
    return (CARD_FILE, REPORT_FILE, METRICS_FILE, config, weights, "tokenizer.json")
