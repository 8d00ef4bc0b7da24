"""Outcome and model card of a quantization-aware training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ....ds_configs.quantization.scheme import QuantizationScheme
from ....plugins.huggingface_hub import CARD_FILE, shown_name, title_of
from ...counting.counts import Estimate
from ...reports.report import card_text, code, license_line, usage
from ...reports.runs import scheme_text
from ...runs.run import LaunchedOutcome, StepResult, with_spreads
from ...runs.settings import METRICS_FILE, REPORT_FILE
from .settings import QATSettings, is_own_teacher

SCHEMA_VERSION = 1
"""Version of `qat --format json`."""
FILES = (
    *(CARD_FILE, REPORT_FILE, METRICS_FILE),
    *("config.json", "model.safetensors", "tokenizer.json", "qat_report.json"),
)
"""Files that a run writes into its output directory, in addition to the plan's."""
_STAGES = {
    "dense": "before, in full precision",
    "rounded": "before, rounded to the nearest",
    "trained": "trained, as exported",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class QATResult(StepResult):
    """Measurements of the ranks; the content of `result.json`."""

    dense: float | None
    """Cross-entropy on the held-out samples before the first step, in full precision, in nats per token."""
    rounded: float | None
    """The same of the untrained model, rounded to the nearest; `None` if ranges were estimated during training."""
    trained: float
    """The same of the trained model with the quantized values of its checkpoint."""
    dense_standard_error: float | None = None
    """Of `dense`, over samples; `None` with a single one."""
    rounded_standard_error: float | None = None
    """Of `rounded`, likewise."""
    trained_standard_error: float | None = None
    """Of `trained`, likewise."""
    weight_difference: float | None
    """Largest difference between a weight of the trained model and that of the checkpoint; `None`: not compared."""
    logit_difference: float | None
    """Likewise between logits, the checkpoint being loaded in a fresh process."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class QATOutcome(LaunchedOutcome):
    """Result of a quantization-aware training that succeeded."""

    settings: QATSettings
    model: str
    """Hub id or directory that training started from."""
    teacher: str | None
    """Hub id or directory of the teacher; `None` without one."""
    scheme: QuantizationScheme
    """Formats of the checkpoint."""
    layers: int
    """Number of quantized matrices."""
    result: QATResult

    def measures(self) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        """Return the results of the trained model, and before training rounded and in full precision."""
        rows = []
        for stage, name in reversed(_STAGES.items()):
            nats, error = getattr(self.result, stage), getattr(self.result, f"{stage}_standard_error")
            loss = None if nats is None else Estimate(value=nats, standard_error=error)
            rows.append((name, *with_spreads(loss)))
        return ("", "cross-entropy, nats per token", "perplexity"), rows

    def to_dict(self) -> dict[str, Any]:
        result = self.result
        return {
            "schema_version": SCHEMA_VERSION,
            "model": self.model,
            "teacher": self.teacher,
            "scheme": asdict(self.scheme) | {"format": self.scheme.format},
            "quantized_layers": self.layers,
            **self.where_and_what(),
            "cross_entropy": {stage: getattr(result, stage) for stage in _STAGES},
            "cross_entropy_standard_error": {stage: getattr(result, f"{stage}_standard_error") for stage in _STAGES},
            "weight_difference": result.weight_difference,
            "logit_difference": result.logit_difference,
            **self.speed(),
        }

    def card(self) -> str:
        model = self.model
        others = () if self.teacher in (None, model) else (self.teacher,)
        objective = "the labels of the data"
        if self.teacher is not None:
            precision = " in full precision" if is_own_teacher(self.settings, model) else ""
            share, teacher = self.settings.alpha, code(shown_name(self.teacher))
            objective = f"outputs of {teacher}{precision}, {self.settings.loss} with weight {share:g}"
            objective += "" if share == 1 else f", and the labels of the data with weight {1 - share:g}"
        lead = (
            f"{code(shown_name(model))} trained on {code(self.statistics.source_name)} with the quantized values of "
            f"this checkpoint in every forward pass: {scheme_text(asdict(self.scheme))}. It was trained on {objective}."
        )
        loading = (
            "Transformers loads it if `compressed-tensors` is installed. vLLM reads the format, and runs the bits and "
            "group sizes that it has kernels for."
        )
        licenses = " ".join(license_line(source) for source in (model, *others))
        return card_text(
            f"{title_of(model)}, {self.scheme.name}",
            [lead, loading, usage(), *self.card_results()],
            f"{licenses} These terms and those of the data may also apply to the checkpoint. Read them before you "
            "publish it.",
            base=model,
            relation="quantized",
            tags=("compressed-tensors", "qat"),
            others=others,
        )
