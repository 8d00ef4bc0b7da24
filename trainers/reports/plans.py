"""Reports of plans, and comparisons of runs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from ...ds_configs.plan.plan import Plan
from ...ds_configs.search.reasons import display_name
from ...ds_configs.search.run_estimates import doubts
from ...ds_configs.search.tuning import Trial
from ...ds_configs.specs.units import human_count
from .report import (
    Fact,
    Report,
    Section,
    Table,
    gb,
    gb_range,
    short_name,
    significant,
)


def speed_interval(plan: Plan) -> tuple[float, float]:
    """Return the lowest and highest tokens/s within the interval of the predicted step time."""
    time = plan.chosen.time
    tokens = time.tokens_per_second * time.seconds
    return tokens / time.high_seconds, tokens / time.low_seconds


def plan_report(plan: Plan) -> Report:
    """Return the report of a plan: the selected layout, its memory and time by term, and the other layouts."""
    model, hardware, chosen, strategy = plan.model, plan.hardware, plan.chosen, plan.chosen.strategy
    gpu, host, time = chosen.memory.gpu, chosen.memory.host, chosen.time
    low, high = speed_interval(plan)
    reasons = [chosen.reason]
    reasons += [f"{role.capitalize()}: {choice.reason}" for role, choice in chosen.placements.items()]
    if plan.activations == "upper bound":
        reasons.append("Activations and loss are an upper bound from the model's structure. The run may need less.")
    reasons += [f"Less certain: {doubt}" for doubt in doubts(strategy, model, hardware, plan.job)]
    return Report(
        kind="Plan",
        title=short_name(model.name),
        subtitle=f"{model.architecture}, {human_count(model.parameter_count)} parameters, on {hardware.world_size} x "
        f"{hardware.gpu} ({gb(hardware.gpu_bytes)} usable each)",
        facts=(
            Fact(
                "Layout",
                display_name(strategy),
                f"micro-batch {strategy.micro_batch_size} × {strategy.gradient_accumulation_steps}",
            ),
            Fact(
                "Memory per accelerator, predicted",
                gb(gpu.peak_bytes),
                f"{gb_range(gpu.low_bytes, gpu.high_bytes)}, of {gb(gpu.capacity_bytes)}",
            ),
            Fact(
                "Tokens/s, predicted",
                significant(time.tokens_per_second),
                f"{significant(low)} to {significant(high)}, all ranks together",
            ),
            Fact(
                "Step, predicted",
                f"{significant(time.seconds, 3)} s",
                f"{significant(time.low_seconds, 3)} to {significant(time.high_seconds, 3)} s",
            ),
            Fact(
                "Host memory per node, predicted",
                gb(host.peak_bytes_per_node),
                f"of {gb(host.capacity_bytes_per_node)}",
            ),
        ),
        sections=(
            Section("Why this layout", reasons),
            *([_trials(plan.trials)] if plan.trials else []),
            _plan_memory(plan),
            _plan_time(plan),
            _other_layouts(plan),
        ),
        command=plan.command,
        versions=dict(plan.versions),
        files=("plan.json",),
    )


def trial_rows(trials: Sequence[Trial]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return headings and rows of measured layouts, with predictions."""
    headings = ("layout", "micro-batch", "result", "s per step", "predicted", "spread", "tensors", "predicted tensors")
    rows: list[tuple[str, ...]] = []
    for trial in trials:
        strategy = trial.strategy
        size = f"{strategy.micro_batch_size} x {strategy.gradient_accumulation_steps}"
        seconds = "–" if trial.step_seconds is None else significant(trial.step_seconds, 3)
        varies = "–" if trial.spread is None else f"{100 * trial.spread:.0f} %"
        memory = _measured(trial.peak_allocated_bytes), gb(trial.predicted_allocated_bytes)
        result = f"{trial.outcome}: {trial.detail}" if trial.detail else trial.outcome
        rows.append((trial.name, size, result, seconds, significant(trial.predicted_seconds, 3), varies, *memory))
    return headings, rows


def _trials(trials: Sequence[Trial]) -> Section:
    headings, rows = trial_rows(trials)
    caption = "Spread: longest minus shortest timed step, divided by the median. Tensors: of the fullest rank."
    return Section("Measured layouts", tables=(Table(headings, rows, caption),))


def _plan_memory(plan: Plan) -> Section:
    gpu = plan.chosen.memory.gpu
    phases = ", ".join(f"{name} {gb(count)}" for name, count in gpu.phases.items())
    captions = {
        "accelerator": f"Terms of the {gpu.phase} phase. Tensors by phase: {phases}.",
        "host": "Host memory of a node.",
    }
    tables = []
    for place, caption in captions.items():
        terms = [(term, term.bytes) for term in plan.chosen.terms if term.bytes is not None and term.lives_on == place]
        rows = [(term.title, gb(count), term.meaning) for term, count in sorted(terms, key=lambda item: -item[1])]
        tables.append(Table(("term", "size", "meaning"), rows, caption))
    return Section("Memory", tables=tables)


def _plan_time(plan: Plan) -> Section:
    time = plan.chosen.time
    terms = [(term, term.seconds) for term in plan.chosen.terms if term.seconds is not None]
    caption = f"Total {time.seconds:.4f} s ({time.low_seconds:.4f} to {time.high_seconds:.4f} s)."
    rows = [(term.title, f"{value:.4f} s", term.meaning) for term, value in sorted(terms, key=lambda item: -item[1])]
    return Section("Time of a step", tables=(Table(("term", "time", "meaning"), rows, caption),))


def _other_layouts(plan: Plan) -> Section:
    rows = []
    for other in plan.rejected:
        strategy, gpu, name = other.strategy, other.memory.gpu, display_name(other.strategy)
        size = f"{strategy.micro_batch_size}{' recomputed' if strategy.gradient_checkpointing else ''}"
        memory = f"{gb(gpu.peak_bytes)} ({gb_range(gpu.low_bytes, gpu.high_bytes)})"
        speed = significant(other.time.tokens_per_second)
        rows.append((name, size, memory, speed, other.reason.removeprefix(name).strip()))
    headings = ("layout", "micro-batch", "GPU memory", "tokens/s", "why not")
    return Section("Other layouts", tables=(Table(headings, rows, "Other layouts; those that fit come first."),))


def _measured(count: int | None) -> str:
    return "–" if count is None else gb(count)


def comparison_report(reports: Mapping[str, Report]) -> Report:
    """Return the report of several runs by directory, with their figures in columns."""
    runs = dict(zip(numbered(list(reports)), reports.values(), strict=True))
    details = [
        {fact.label: f"{fact.value} ({fact.detail})" if fact.detail else fact.value for fact in run.facts}
        for run in runs.values()
    ]
    labels = dict.fromkeys(label for figures in details for label in figures)
    rows = [
        ("kind", *(run.kind for run in runs.values())),
        ("model", *(run.title for run in runs.values())),
        ("where", *(run.subtitle for run in runs.values())),
        *((label, *(figures.get(label, "–") for figures in details)) for label in labels),
    ]
    made = [(name, run.command or "a Python program") for name, run in runs.items()]
    return Report(
        kind="Comparison",
        title=" · ".join(runs),
        subtitle=", ".join(dict.fromkeys(run.kind for run in runs.values())),
        facts=[Fact(name, run.facts[0].value, f"{run.facts[0].label}; {run.title}") for name, run in runs.items()],
        sections=(
            Section("Side by side", tables=(Table(("", *runs), rows),)),
            Section("How the runs were made", tables=(Table(("run", "command"), made),)),
        ),
        command=shlex.join(["shardwright", "report", *reports]),
        files=[f"{directory}/{name}" for directory, run in reports.items() for name in run.files],
    )


def numbered(paths: Sequence[str]) -> list[str]:
    """Return a short name for each directory, numbered where two have the same last part.

    >>> numbered(["runs/a", "old/a", "runs/b"])
    ['a (1)', 'a (2)', 'b']
    """
    last = [path.rstrip("/").rpartition("/")[2] or path for path in paths]
    return [f"{name} ({last[: i + 1].count(name)})" if last.count(name) > 1 else name for i, name in enumerate(last)]
