"""Files of an evaluation: `REPORT.md`, `evaluation.json` and a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...ds_configs.specs.units import gigabytes, human_count
from ..charts.canvas import Draw, panels, png
from ..charts.kinds import distribution, tail
from ..formats.rendering import render, table
from .estimates import Estimate
from .result import Evaluation, ModelResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REPORT_FILE, RESULT_FILE, CHART_FILE = "REPORT.md", "evaluation.json", "evaluation.png"
FILE_NAMES = (REPORT_FILE, RESULT_FILE, CHART_FILE)
"""What a report is made from; `report.html` lies beside them."""
_UNKNOWN = "–"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One measure of a model, and of its baseline."""

    name: str
    """What is measured, with its unit."""
    model: str
    """The model's."""
    baseline: str
    """The baseline's; empty without one or where it makes no sense."""
    difference: str
    """How they differ; empty likewise."""


def rows(evaluation: Evaluation) -> list[Row]:
    """Return every measure that was taken, for tables of any kind."""
    return [*_quality_rows(evaluation), *_distance_rows(evaluation), *_cost_rows(evaluation), *_task_rows(evaluation)]


def _quality_rows(evaluation: Evaluation) -> list[Row]:
    model, baseline, compared = evaluation.model, evaluation.baseline, evaluation.comparison
    loss = perplexity = ""
    if baseline is not None and compared is not None:
        difference = compared.loss_difference_nats_per_token
        sign = {True: "", False: ", within noise", None: ""}[compared.loss_difference_is_significant]
        loss = f"{_signed(difference)}{sign}"
        perplexity = _percent(model.perplexity.value / baseline.perplexity.value - 1)
    other_loss = "" if baseline is None else _estimate(baseline.loss_nats_per_token)
    other_perplexity = "" if baseline is None else _estimate(baseline.perplexity)
    return [
        Row(name="perplexity", model=_estimate(model.perplexity), baseline=other_perplexity, difference=perplexity),
        Row(name="cross-entropy, nats a token", model=_estimate(model.loss_nats_per_token), baseline=other_loss,
            difference=loss),
    ]  # fmt: skip


def _distance_rows(evaluation: Evaluation) -> list[Row]:
    compared = evaluation.comparison
    if compared is None:
        return []
    tail = compared.kl_nats_at_share
    return [
        Row(name="KL(baseline | model), nats a token", model=_estimate(compared.kl_nats_per_token), baseline="",
            difference=""),
        Row(name="the same, 99 % of the tokens below", model=f"{tail['0.99']:.4g}", baseline="", difference=""),
        Row(name="same most likely token", model=_share(compared.top1_agreement), baseline="", difference=""),
    ]  # fmt: skip


def _cost_rows(evaluation: Evaluation) -> list[Row]:
    model, baseline = evaluation.model, evaluation.baseline
    own_costs, other_costs = _costs(model), {} if baseline is None else _costs(baseline)
    found = []
    for name, (own, shape) in own_costs.items():
        other = other_costs.get(name, (None, shape))[0]
        if own is None and other is None:
            continue
        ratio = f"× {own / other:.3g}" if own and other and not name.startswith("parameters") else ""
        shown = "" if baseline is None else _shaped(other, shape)
        found.append(Row(name=name, model=_shaped(own, shape), baseline=shown, difference=ratio))
    return found


def _shaped(value: float | None, shape: Callable[[float], str]) -> str:
    return _UNKNOWN if value is None else shape(value)


def _costs(found: ModelResult) -> dict[str, tuple[float | None, Callable[[float], str]]]:
    sizes, speed = found.sizes, found.speed
    costs: dict[str, tuple[float | None, Callable[[float], str]]] = {
        "safetensors on disk": (sizes.file_bytes, _bytes),
        "bits for each parameter": (sizes.bits_per_parameter, _short),
        "bits in quantized matrices": (sizes.bits_per_quantized_parameter, _short),
        "parameters": (sizes.parameters, _people),
        "parameters in quantized matrices": (sizes.quantized_parameters, _people),
    }
    if speed is not None:
        costs |= {
            "prefill, tokens/s": (speed.prefill_tokens_per_second, _count),
            "decode, tokens/s": (speed.decode_tokens_per_second, _short),
            "weights in memory": (speed.weight_bytes, _bytes),
            "peak memory of tensors": (speed.peak_bytes, _bytes),
        }
    return costs


def _task_rows(evaluation: Evaluation) -> list[Row]:
    others = {} if evaluation.baseline is None else {(s.task, s.metric): s for s in evaluation.baseline.tasks}
    found = []
    for score in evaluation.model.tasks:
        own = Estimate(value=score.value, standard_error=score.standard_error)
        other = others.get((score.task, score.metric))
        shown = difference = ""
        if other is not None:
            shown = _estimate(Estimate(value=other.value, standard_error=other.standard_error))
            difference = f"{score.value - other.value:+.4f}"
        name = f"{score.task}, {score.metric} ({score.documents:,} documents)"
        found.append(Row(name=name, model=_estimate(own), baseline=shown, difference=difference))
    return found


def verdict(evaluation: Evaluation) -> str:
    """Return in one sentence what the comparison says; empty without a baseline."""
    compared = evaluation.comparison
    if compared is None:
        return ""
    difference = compared.loss_difference_nats_per_token
    ratio = _percent(math.exp(min(difference.value, 700.0)) - 1)
    agreement = f"both find the same next token most likely {_share(compared.top1_agreement)} of the time"
    if compared.loss_difference_is_significant is None:
        return f"Perplexity changes by {ratio} on a single window, which says nothing about noise; {agreement}."
    if not compared.loss_difference_is_significant:
        return f"Perplexity changes by {ratio}, which is within the noise of this text; {agreement}."
    direction = "higher" if difference.value > 0 else "lower"
    return f"Perplexity is {ratio[1:]} {direction} than the baseline's, beyond the noise of this text; {agreement}."


def evaluation_files(evaluation: Evaluation, *, command: str = "") -> dict[str, str | bytes]:
    """Return the report, the numbers and the picture by name; `command` is the command line that asked for them."""
    numbers = json.dumps(evaluation.to_dict() | {"command": command}, indent=2, allow_nan=False) + "\n"
    return {REPORT_FILE: evaluation_report(evaluation), RESULT_FILE: numbers, CHART_FILE: chart(evaluation)}


def evaluation_report(evaluation: Evaluation) -> str:
    """Return `REPORT.md`."""
    return f"# Evaluation report\n\n{report_section(evaluation)}"


def report_section(evaluation: Evaluation) -> str:
    """Return a report below its heading, for a report that tells more."""
    if evaluation.baseline is None:
        measures = table(("", "model"), [(row.name, row.model) for row in rows(evaluation)])
    else:
        found = [(row.name, row.model, row.baseline, row.difference) for row in rows(evaluation)]
        measures = table(("", "model", "baseline", "difference"), found)
    template = "evaluation/templates/section.md.j2"
    return render(template, evaluation=evaluation, verdict=verdict(evaluation), measures=measures)


def chart(evaluation: Evaluation) -> bytes:
    """Return a PNG of :func:`evaluation_figure`."""
    return png(evaluation_figure(evaluation))


def evaluation_figure(evaluation: Evaluation) -> Figure:
    """Return a picture of how much worse a model is everywhere, and how much worse where it is worst.

    Left, the loss difference of each window with the mean and two standard errors: whether the change is beyond noise.
    Right, the KL that a share of the tokens exceeds: a small mean may hide few tokens that are far off. Without a
    baseline, the loss of each window alone.
    """
    return panels(*(draw for _, draw in evaluation_charts(evaluation)))


def evaluation_charts(evaluation: Evaluation) -> tuple[tuple[str, Draw], ...]:
    """Return the drawings of :func:`evaluation_figure` with their titles."""
    compared = evaluation.comparison
    if compared is None:
        mean, values = evaluation.model.loss_nats_per_token, evaluation.window_losses_nats_per_token
        draw = distribution(values, mean.value, mean.standard_error, "cross-entropy, nats a token")
        return (("Cross-entropy of each window, nats a token", draw),)
    values, mean = compared.window_loss_differences_nats_per_token, compared.loss_difference_nats_per_token
    name = "model's loss less the baseline's, nats a token"
    far = tail(compared.kl_nats_at_share, compared.kl_nats_per_token.value, "KL(baseline | model), nats")
    return (
        (
            "Loss difference of each window, nats a token",
            distribution(values, mean.value, mean.standard_error, name, zero="no difference"),
        ),
        ("Tokens that are far off: KL(baseline | model), nats", far),
    )


def _estimate(found: Estimate) -> str:
    if found.standard_error is None:
        return f"{found.value:.5g}"
    return f"{found.value:.5g} ± {found.standard_error:.2g}"


def _signed(found: Estimate) -> str:
    error = "" if found.standard_error is None else f" ± {found.standard_error:.2g}"
    return f"{found.value:+.4g}{error}"


def _percent(share: float) -> str:
    return f"{100 * share:+.2f} %"


def _share(found: Estimate) -> str:
    error = "" if found.standard_error is None else f" ± {100 * found.standard_error:.2g}"
    return f"{100 * found.value:.2f}{error} %"


def _bytes(count: float) -> str:
    return f"{gigabytes(count)} GB" if count >= 10**8 else f"{count / 10**6:.2f} MB"


def _people(value: float) -> str:
    return human_count(int(value))


def _short(value: float) -> str:
    return f"{value:.3f}" if value < 100 else f"{value:,.0f}"


def _count(value: float) -> str:
    return f"{value:,.0f}"
