"""Page of a launched training: what `train`, `distill` and `qat` leave in their output directory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...ds_configs.plan.plan import Plan
from ..charts.canvas import GREEN, GREY, RED
from ..charts.kinds import Expected, columns, curves, largest_parts, stacks
from ..charts.steps import LOSSES, SHARES, Metrics, loss_chart, points, rate_chart, share_chart
from .page import Chart, Page, Section, Table, Tile
from .planned import speed_interval
from .words import gb, gb_range, mean_with_error, plain, short_name, significant, unit_of, with_error

KINDS = {"train": "Training", "distill": "Distillation", "qat": "Quantization-aware training"}
LOSS_SERIES, SPEED_SERIES = "training loss, nats a token", "tokens/s"


def training_page(data: Mapping[str, Any], metrics: Metrics, plan: Plan) -> Page:
    """Return the report of `report.json`, `metrics.jsonl` and the plan that was run."""
    speeds = points(metrics, "tokens_per_second")
    return Page(
        kind=KINDS[data["kind"]],
        title=_title(data),
        subtitle=f"on {data['dataset']['source']}; {data['strategy']}, {data['hardware']}",
        tiles=(*_quality_tiles(data), *_cost_tiles(data, metrics, plan)),
        sections=(
            _measures(data, metrics),
            _speed(data, metrics, plan),
            _memory(data, metrics, plan),
            _settings(data, plan),
        ),
        command=data.get("command", ""),
        versions=data["versions"],
        files=("report.json", "metrics.jsonl", "plan/plan.json"),
        series={LOSS_SERIES: points(metrics, "loss"), SPEED_SERIES: speeds},
        measures=_compared(data),
    )


def _title(data: Mapping[str, Any]) -> str:
    if data["kind"] == "distill":
        return f"{short_name(data['teacher'])} to {short_name(data['student'])}"
    return short_name(data["model"])


def _held_out(data: Mapping[str, Any]) -> dict[str, float | None]:
    """Return cross-entropies on the held-out samples by state of the model, the trained one last."""
    if data["kind"] == "distill":
        found = {name: data[name].get("student_cross_entropy", data[name].get("loss")) for name in ("before", "after")}
        return {"before": found["before"], "trained": found["after"]}
    stages = data["cross_entropy"]
    if data["kind"] == "qat":
        names = {"dense": "before", "rounded": "rounded", "trained": "trained"}
        return {label: stages[name] for name, label in names.items()}
    return {"before": stages["before"], "trained": stages["after"]}


def _quality_tiles(data: Mapping[str, Any]) -> tuple[Tile, ...]:
    found = _held_out(data)
    *earlier, (_, trained) = found.items()
    beside = ", ".join(f"{name} {value:.4f}" for name, value in earlier if value is not None)
    samples = f"mean over {data['dataset']['evaluation_samples']} held-out samples"
    if trained is None:
        return (Tile(label="Held-out cross-entropy", value="not measured"),)
    tiles = [
        Tile(label="Held-out cross-entropy, nats a token", value=f"{trained:.4f}", detail=f"{beside}; {samples}"),
        Tile(label="Held-out perplexity", value=_perplexity(trained), detail=_perplexities(earlier)),
    ]
    for key, label in (("kl_per_token", "KL(teacher | student), nats a token"),):
        if key in data.get("after", {}):
            before = f"before {data['before'][key]:.4f}"
            tiles.append(Tile(label=label, value=f"{data['after'][key]:.4f}", detail=before))
    if data.get("logit_difference") is not None:
        tiles.append(
            Tile(label="Largest difference of a logit, exported and reloaded", value=f"{data['logit_difference']:g}")
        )
    return tuple(tiles)


def _perplexity(nats: float) -> str:
    return f"{math.exp(min(nats, 700)):.4g}"


def _perplexities(stages: Sequence[tuple[str, float | None]]) -> str:
    return ", ".join(f"{name} {_perplexity(value)}" for name, value in stages if value is not None)


def _cost_tiles(data: Mapping[str, Any], metrics: Metrics, plan: Plan) -> tuple[Tile, ...]:
    low, high = speed_interval(plan)
    expected = (
        f"predicted {significant(plan.chosen.time.tokens_per_second)} ({significant(low)} to {significant(high)})"
    )
    gpu, peak = plan.chosen.memory.gpu, data["result"]["peak_bytes"]
    memory = f"predicted {gb(gpu.allocated_bytes)} of tensors, {gb_range(gpu.low_bytes, gpu.high_bytes)} in all"
    return (
        Tile(label="Tokens/s of all ranks", value=_speed_shown(data, metrics), detail=expected),
        Tile(
            label="Tensors on the fullest accelerator",
            value="not measured" if peak is None else gb(peak),
            detail=f"{'no accelerator; ' if peak is None else ''}{memory}",
        ),
        Tile(
            label="Steps",
            value=f"{data['steps']:,}",
            detail=f"{data['tokens']:,} tokens, {data['seconds']:,.0f} s in all",
        ),
    )


def _speed_shown(data: Mapping[str, Any], metrics: Metrics) -> str:
    """Return the speed of all steps, with the standard error over logged stretches behind the first."""
    speeds = [value for _, value in points(metrics, "tokens_per_second")][1:]
    error = mean_with_error(speeds)[1] if speeds else None
    return with_error(data["tokens_per_second"], error)


def _measures(data: Mapping[str, Any], metrics: Metrics) -> Section:
    found = {name: math.exp(min(value, 700)) for name, value in _held_out(data).items() if value is not None}
    caption = f"Means over all labelled tokens of {data['dataset']['evaluation_samples']} held-out samples"
    if any(data.get("cross_entropy_standard_error", {}).values()):
        caption += "; ± is one standard error, over samples."
    else:
        caption += ", which are not told apart: they carry no error. `shardwright evaluate` gives one."
    table = Table(headings=data["measures"]["headings"], rows=data["measures"]["rows"], caption=caption)
    charts = [Chart(title="Loss by step, nats a token", draw=loss_chart(metrics), note=_loss_note(data, metrics))]
    if any(points(metrics, key) for key in SHARES):
        charts.append(Chart(title="Agreement with the teacher, share of tokens", draw=share_chart(metrics)))
    if found:
        draw = columns(found, "perplexity", colours=(GREY, GREEN) if len(found) == 2 else (GREY, RED, GREEN))
        charts.append(Chart(title="Perplexity on held-out samples", draw=draw))
    if points(metrics, "learning_rate"):
        charts.append(Chart(title="Learning rate", draw=rate_chart(metrics)))
    return Section(heading="What was learnt", charts=charts, tables=(table,))


def _loss_note(data: Mapping[str, Any], metrics: Metrics) -> str:
    logged = [key for key in LOSSES if points(metrics, key)]
    last = {LOSSES[key][0]: points(metrics, key)[-1][1] for key in logged}
    stretch = data["settings"].get("logging_steps")
    ended = ", ".join(f"{label} {value:.4f}" for label, value in last.items())
    return f"Means over {stretch} steps. At the end: {ended}." if ended else ""


def _speed(data: Mapping[str, Any], metrics: Metrics, plan: Plan) -> Section:
    time, (low, high) = plan.chosen.time, speed_interval(plan)
    steps = [value for _, value in points(metrics, "step_seconds")]
    whole = data["result"]["step_seconds"] / data["steps"] if data["steps"] else 0.0
    value, error = mean_with_error(steps[1:]) if len(steps) > 1 else (whole, None)
    seconds = with_error(value, error)
    rows = [
        ("tokens/s of all ranks", f"{significant(time.tokens_per_second)} ({significant(low)} to {significant(high)})",
         _speed_shown(data, metrics)),
        ("seconds of a step", f"{significant(time.seconds)} ({significant(time.low_seconds)} to "
         f"{significant(time.high_seconds)})", seconds),
    ]  # fmt: skip
    table = Table(headings=("", "predicted, with its interval", "measured"), rows=rows, caption=_SPEED_CAPTION)
    charts = []
    if speeds := points(metrics, "tokens_per_second"):
        expected = Expected(value=time.tokens_per_second, low=low, high=high)
        draw = curves({"measured": speeds}, "tokens/s", expected=expected)
        charts.append(Chart(title="Tokens/s of all ranks", draw=draw, note="Dashed: what the plan predicted."))
    if lag := points(metrics, "slowest_rank_ratio"):
        draw = curves({"slowest rank": lag}, "times the median rank", expected=Expected(value=1, label="no lag"))
        note = (
            "Time for loading and the first forward pass of a step, which a rank does alone, beside the median rank's."
        )
        charts.append(Chart(title="Rank that lags most", draw=draw, note=note))
    text = f"The prediction counts on {plan.hardware.gpu}: {plan.hardware.source}."
    return Section(heading="Speed", texts=(text,) if plan.hardware.source else (), charts=charts, tables=(table,))


_SPEED_CAPTION = (
    "± is the standard error over the stretches between two lines of metrics.jsonl, without the first, which compiles "
    "and allocates; the measured tokens/s count every step."
)


def _memory(data: Mapping[str, Any], metrics: Metrics, plan: Plan) -> Section:
    gpu, peak = plan.chosen.memory.gpu, data["result"]["peak_bytes"]
    measured = "not measured on CPU ranks" if peak is None else gb(peak)
    rows = [
        ("tensors on the fullest accelerator", gb(gpu.allocated_bytes), measured),
        ("with runtime and fragmentation", f"{gb(gpu.peak_bytes)} ({gb_range(gpu.low_bytes, gpu.high_bytes)})", "–"),
        ("capacity", gb(gpu.capacity_bytes), ""),
    ]
    outside = ("runtime_context", "communicators", "allocator_fragmentation")
    terms = sorted(gpu.terms.items(), key=lambda item: -item[1])
    unit, size = unit_of([gpu.allocated_bytes])
    tensors = {name.replace("_", " "): count / size for name, count in terms if name not in outside}
    bars: list[tuple[str, Mapping[str, float], bool]] = [("predicted", largest_parts(tensors), True)]
    if peak is not None:
        bars.append(("measured", {"tensors, measured": peak / size}, False))
    title = f"Tensors on the fullest accelerator, {unit}"
    chart = Chart(title=title, draw=stacks(bars, unit), note=f"Measured: {measured}.")
    table = Table(headings=("", "predicted, with its interval", "measured"), rows=rows)
    return Section(heading="Memory", charts=(chart,), tables=(table,))


def _settings(data: Mapping[str, Any], plan: Plan) -> Section:
    tables = [
        Table(headings=("", "value"), rows=[(n.replace("_", " "), plain(v)) for n, v in data[key].items()],
              caption=caption, figures=False)
        for key, caption in (("settings", "Settings"), ("dataset", "Data"))
    ]  # fmt: skip
    named = [(name, data[name]) for name in ("model", "teacher", "student") if data.get(name)]
    tables.insert(0, Table(headings=("", "value"), rows=named, caption="Models", figures=False))
    return Section(heading="Settings and data", texts=(plan.chosen.reason,), tables=tables, folded=True)


def _compared(data: Mapping[str, Any]) -> dict[str, float]:
    trained = list(_held_out(data).values())[-1]
    found = {"tokens/s": data["tokens_per_second"], "seconds in all": data["seconds"]}
    if trained is not None:
        found = {"held-out cross-entropy, nats a token": trained} | found
    if data["result"]["peak_bytes"] is not None:
        found["tensors on the fullest accelerator, GB"] = data["result"]["peak_bytes"] / 1e9
    return found
