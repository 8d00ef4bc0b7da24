"""Outcome and model card of a training run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import nan
from typing import Any

from ...plugins.huggingface_hub import CARD_FILE, shown_name, title_of
from ..counting.counts import Estimate
from ..reports.markdown import card_text, code, license_line, usage
from ..runs.report import LaunchedOutcome, StepResult, with_spreads
from ..runs.settings import METRICS_FILE, REPORT_FILE
from .settings import TrainSettings

SCHEMA_VERSION = 1
"""Version of `train --format json`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult(StepResult):
    """Measurements of the ranks; the content of `result.json`."""

    before: float | None
    """Cross-entropy on the held-out samples before the first step, in nats per token; `None` under context parallelism,
    where it cannot be measured."""
    after: float | None
    """The same after the last step."""
    before_standard_error: float | None
    """Of `before`, over samples; `None` if ranks share samples, and for a single sample."""
    after_standard_error: float | None
    evaluations: dict[str, dict[str, float]] = field(default_factory=dict)
    """Of a task other than `sft`: what TRL's trainer measures on the held-out rows `before` and `after` training."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class TrainOutcome(LaunchedOutcome):
    settings: TrainSettings
    model: str
    """Hub id, directory or `config.json` that training started from."""
    result: TrainResult

    def measures(self) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        result = self.result
        if result.evaluations:
            first = result.evaluations["before"]
            last = result.evaluations["after"].items()
            rows = [(name, f"{first.get(name, nan):.4f}", f"{value:.4f}") for name, value in last]
            return ("held-out rows", "before", "after"), rows
        if result.before is None or result.after is None:
            return ("", "before", "after"), [("cross-entropy, nats per token", "not measured", "not measured")]
        before = Estimate(value=result.before, standard_error=result.before_standard_error)
        after = Estimate(value=result.after, standard_error=result.after_standard_error)
        names = ("cross-entropy, nats per token", "perplexity")
        return ("", "before", "after"), list(zip(names, with_spreads(before), with_spreads(after), strict=True))

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "model": self.model,
            **self.where_and_what(),
            "cross_entropy": {"before": self.result.before, "after": self.result.after},
            "cross_entropy_standard_error": {
                "before": self.result.before_standard_error,
                "after": self.result.after_standard_error,
            },
            **({"task": self.settings.task, "evaluations": self.result.evaluations} if self.result.evaluations else {}),
            **self.speed(),
        }

    def card(self) -> str:
        source, model, adapter = self.statistics.source_name, self.model, self.settings.method != "full"
        name = "QLoRA" if self.settings.method == "qlora" else "LoRA"
        method = f" with {name} adapters of rank {self.settings.lora_rank}" if adapter else ""
        task = self.settings.task
        measured = "cross-entropy of the labelled tokens" if task == "sft" else f"{task.upper()}, by TRL's trainer"
        lead = f"{code(shown_name(model))} trained on {code(source)}{method}: {measured}."
        return card_text(
            f"{title_of(model)}, trained on {source}",
            [lead, usage(adapter=adapter), *self.card_results()],
            f"{license_line(model)} The terms of the data may also apply to this model. "
            "Read both before you publish it.",
            base=model,
            relation="adapter" if adapter else "finetune",
            library="peft" if adapter else "transformers",
            tags=(),
        )


def train_file_names(settings: TrainSettings) -> tuple[str, ...]:
    """Return the files that a run writes into its output directory, in addition to the plan's."""
    adapter = settings.method != "full"
    weights = "adapter_model.safetensors" if adapter else "model.safetensors"
    config = "adapter_config.json" if adapter else "config.json"
    return (CARD_FILE, REPORT_FILE, METRICS_FILE, config, weights, "tokenizer.json")
