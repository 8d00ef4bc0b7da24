"""Files of a quantization-aware training: `REPORT.md`, the model card, and the chart of its training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ....ds_configs.quantization.scheme import QuantizationScheme
from ....plugins.huggingface_hub.cards import CARD_FILE, shown_name
from ...charts import steps
from ...charts.canvas import GREEN, GREY, RED, panels, png
from ...charts.kinds import columns
from ...evaluation.estimates import Estimate
from ...formats.rendering import table
from ...runs.report import (
    REPORT_FILE,
    LaunchedOutcome,
    StepResult,
    card_text,
    number,
    report_text,
    with_spreads,
)
from ...runs.settings import METRICS_FILE
from ..export.files import ADAPTER
from .request import TEACHERS_OWN, QATSettings, is_own_teacher

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEMA_VERSION = 1
"""Version of `qat --format json`."""
CHART_FILE = "qat.png"
_TEMPLATES = "qat/command/templates"
_COLOURS = (GREY, RED, GREEN)


@dataclass(frozen=True, kw_only=True, slots=True)
class QATResult(StepResult):
    """Measurements of the ranks, as they stand in `result.json`."""

    dense: float | None
    """Cross-entropy on the held-out samples before the first step, in full precision, in nats a token."""
    rounded: float | None
    """The same of the untrained model, rounded to the nearest; `None` where ranges were found while training ran."""
    trained: float
    """The same of the trained model with the numbers of its checkpoint."""
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
    """A quantization-aware training that ended well."""

    settings: QATSettings
    """What was asked for."""
    model: str
    """Hub id or directory that training started from."""
    teacher: str | None
    """Hub id or directory of the teacher; `None` without one."""
    scheme: QuantizationScheme
    """The numbers of the checkpoint."""
    layers: int
    """Matrices that are quantized."""
    result: QATResult
    """What was measured."""

    def measures(self) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        """Return the measures of the three states of the model."""
        return ("", "nats a token", "perplexity"), [stage.row for stage in reversed(stages(self.result))]

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as JSON values."""
        return {
            "schema_version": SCHEMA_VERSION,
            "model": self.model,
            "teacher": self.teacher,
            "scheme": asdict(self.scheme) | {"format": self.scheme.format},
            "quantized_layers": self.layers,
            **self.where_and_what(self.settings),
            "cross_entropy": {stage.key: stage.nats for stage in stages(self.result)},
            "cross_entropy_standard_error": {stage.key: stage.standard_error for stage in stages(self.result)},
            "weight_difference": self.result.weight_difference,
            "logit_difference": self.result.logit_difference,
            **self.speed(self.result),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One state of the model, on the held-out samples."""

    key: str
    """Short name."""
    name: str
    """What it is."""
    nats: float | None
    """Cross-entropy in nats a token; `None` where it was not measured."""
    standard_error: float | None
    """Of it, over samples."""

    @property
    def row(self) -> tuple[str, str, str]:
        """Name, cross-entropy and perplexity as text."""
        if self.nats is None:
            return self.name, "not measured", "not measured"
        return self.name, *with_spreads(Estimate(value=self.nats, standard_error=self.standard_error))


def stages(result: QATResult) -> tuple[Stage, Stage, Stage]:
    """Return the model before training, the same rounded, and what is exported."""
    names = {
        "dense": "before, in full precision",
        "rounded": "before, rounded to the nearest",
        "trained": "trained, as exported",
    }
    dense, rounded, trained = (
        Stage(key=key, name=name, nats=getattr(result, key), standard_error=getattr(result, f"{key}_standard_error"))
        for key, name in names.items()
    )
    return dense, rounded, trained


def recovered(result: QATResult) -> float | None:
    """Return the share ``(rounded - trained) / (rounded - dense)`` of what rounding costs; `None` if it costs nothing.

    Above 1 the training has also taught the model its data.
    """
    if result.dense is None or result.rounded is None or result.rounded <= result.dense:
        return None
    return (result.rounded - result.trained) / (result.rounded - result.dense)


def qat_file_names(settings: QATSettings) -> tuple[str, ...]:
    """Return the names of the files that a run leaves in its output directory, beside the plan's."""
    adapter = ("adapter/adapter_config.json", "adapter/adapter_model.safetensors")
    model = ("config.json", "model.safetensors", "tokenizer.json", "qat_report.json")
    beside = adapter if settings.method == "lora" and settings.lora == "on_quantized_base" else ()
    return (CARD_FILE, REPORT_FILE, CHART_FILE, METRICS_FILE, *model, *beside)


def qat_files(outcome: QATOutcome) -> dict[str, str | bytes]:
    """Return the report, the model card and the chart by name."""
    return {REPORT_FILE: qat_report(outcome), CARD_FILE: qat_card(outcome), CHART_FILE: png(qat_figure(outcome))}


def qat_report(outcome: QATOutcome) -> str:
    """Return `REPORT.md`."""
    left_out = () if outcome.settings.teacher else (*TEACHERS_OWN, "teacher_placement")
    shown = outcome.settings.model_dump(exclude=set(left_out))
    shown["learning_rate"] = outcome.settings.base_learning_rate()
    share, result = recovered(outcome.result), outcome.result
    return report_text(
        f"{_TEMPLATES}/report.md.j2",
        outcome,
        shown,
        measures=_stage_table(result),
        facts=checkpoint_facts(outcome),
        share=share,
        cost=None if share is None else number((result.rounded or 0) - (result.dense or 0)),
    )


def checkpoint_facts(outcome: QATOutcome) -> list[tuple[str, str]]:
    """Return what was written, and how it was proven to be what was trained."""
    scheme, result = outcome.scheme, outcome.result
    return [
        ("format", f"compressed-tensors, {scheme.format}"),
        ("weights", weights_sentence(scheme)),
        ("quantized matrices", f"{outcome.layers:,}"),
        ("largest difference of a weight, trained and exported", _difference(result.weight_difference)),
        ("largest difference of a logit, trained and reloaded", _difference(result.logit_difference)),
    ]


def _difference(value: float | None) -> str:
    return "not compared" if value is None else f"{value:g}"


def weights_sentence(scheme: QuantizationScheme) -> str:
    """Return bits, zero points and what shares a scale, and what inputs are rounded to, in words."""
    weights, inputs = scheme.weights, scheme.activations
    shared = {"tensor": "a scale for each matrix", "channel": "a scale for each output channel"}
    scales = shared.get(weights.strategy, f"a scale for {weights.group_size} weights")
    text = f"{weights.bits} bit, {'symmetric' if weights.symmetric else 'with zero points'}, {scales}"
    if inputs is None:
        return text
    return f"{text}; inputs {inputs.bits} bit, {'by token' if inputs.dynamic else 'with stored ranges'}"


def qat_card(outcome: QATOutcome) -> str:
    """Return the checkpoint's `README.md`, with the metadata that the Hub reads."""
    settings = outcome.settings
    others = () if outcome.teacher in (None, outcome.model) else (outcome.teacher,)
    return card_text(
        f"{_TEMPLATES}/card.md.j2",
        outcome.model,
        "quantized",
        "transformers",
        ("compressed-tensors", "qat"),
        outcome=outcome,
        models=(outcome.model, *others),
        others=others,
        weights=weights_sentence(outcome.scheme),
        objective=_objective(outcome),
        measures=_stage_table(outcome.result),
        adapter=ADAPTER if settings.method == "lora" and settings.lora == "on_quantized_base" else None,
    )


def _objective(outcome: QATOutcome) -> str:
    if outcome.teacher is None:
        return "It learned from the data's own tokens."
    own = " in full precision" if is_own_teacher(outcome.settings, outcome.model) else ""
    share = outcome.settings.alpha
    labels = "" if share == 1 else f", and from the data's own tokens with weight {1 - share:g}"
    teacher = shown_name(outcome.teacher)
    return f"It learned from `{teacher}`{own}, {outcome.settings.loss} with weight {share:g}{labels}."


def _stage_table(result: QATResult) -> str:
    return table(("", "cross-entropy, nats a token", "perplexity"), [stage.row for stage in stages(result)])


def qat_figure(outcome: QATOutcome) -> Figure:
    """Return the chart: perplexities on the left, the loss of every logged step on the right."""
    names = {"dense": "before", "rounded": "rounded", "trained": "trained"}
    nats = {names[stage.key]: stage.nats for stage in stages(outcome.result)}
    found = {name: math.exp(min(value, 700)) for name, value in nats.items() if value is not None}
    colours = [colour for name, colour in zip(nats, _COLOURS, strict=True) if name in found]
    samples = outcome.statistics.evaluation_samples
    bars = columns(found, f"perplexity on {samples} held-out samples", colours=colours)
    return panels(bars, steps.loss_chart(outcome.metrics))
