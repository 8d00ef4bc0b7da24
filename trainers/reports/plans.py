"""Reports of checks, plans, measured runs of a plan, rehearsals, and comparisons of runs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ...ds_configs.memory.terms import TERM_MEANINGS
from ...ds_configs.plan.measurement import FILE_NAME, RunMeasurement
from ...ds_configs.plan.plan import Plan
from ...ds_configs.search.reasons import display_name
from ...ds_configs.search.run_estimates import doubts
from ...ds_configs.search.tuning import Trial
from ...ds_configs.specs.units import human_count
from ...ds_configs.step_time.estimate import TIME_TERM_MEANINGS, time_term_name
from ...plugins.planning.from_names import installed_versions
from .charts import curves, largest_parts, parts, stacks
from .report import (
    Chart,
    Fact,
    Report,
    Section,
    Table,
    gb,
    gb_range,
    plain,
    short_name,
    significant,
)


def check_report(data: Mapping[str, Any], *, command: str) -> Report:
    """Return the report of the JSON output of `check`."""
    findings = sorted(data["findings"], key=lambda finding: finding["kind"] != "error")
    errors, files = data["errors"], data["files"]
    rows = [
        (finding["kind"], finding["where"], plain(finding["value"])[:200], finding["rule"], plain(finding["fix"]))
        for finding in findings
    ]
    table = Table(("severity", "location", "value", "rule", "fix"), rows)
    return Report(
        kind="Check",
        title=", ".join(files[:3]) + (" and more" if len(files) > 3 else ""),
        subtitle="DeepSpeed and Accelerate configuration",
        facts=(
            Fact("Errors", str(errors)),
            Fact("Warnings", str(len(findings) - errors)),
            Fact("Files", str(len(files)), ", ".join(files)),
        ),
        sections=(
            Section("Findings", tables=(table,)) if rows else Section("Findings", ("No errors and no warnings.",)),
        ),
        command=command,
        versions=dict(installed_versions()),
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
    if chosen.teacher is not None:
        reasons.append(f"Teacher: {chosen.teacher.reason}")
    if plan.activations == "upper bound":
        reasons.append("Activations and loss are an upper bound from the model's structure. The run may need less.")
    reasons += [f"Changes the results: {offer}" for offer in plan.offers]
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
        measures={
            "predicted memory per accelerator, GB": gpu.peak_bytes / 1e9,
            "predicted tokens/s": time.tokens_per_second,
        },
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
    bars: list[tuple[str, Mapping[str, float], bool]] = []
    for trial in trials:
        if trial.step_seconds is not None:
            bars += [(trial.name, {"step": trial.predicted_seconds}, True), ("", {"step": trial.step_seconds}, False)]
    note = "Hatched: predicted. Beside it: the median of the slowest rank, of layouts that ended early of fewer steps."
    chart = Chart("Step by layout, predicted and measured, seconds", stacks(bars, "seconds"), note)
    caption = "Spread: longest minus shortest timed step, divided by the median. Tensors: of the fullest rank."
    return Section("Measured layouts", (), (chart,) if bars else (), (Table(headings, rows, caption),))


def _plan_memory(plan: Plan) -> Section:
    gpu = plan.chosen.memory.gpu
    terms = sorted(gpu.terms.items(), key=lambda item: -item[1])
    bar = largest_parts({name.replace("_", " "): count / 1e9 for name, count in terms})
    limit, interval = ("capacity", gpu.capacity_bytes / 1e9), (gpu.low_bytes / 1e9, gpu.high_bytes / 1e9)
    note = "The bracket is the interval of the prediction. A layout is selected only if its upper end fits."
    draw = stacks([("predicted", bar, False)], "GB", limit=limit, interval=interval)
    phases = ", ".join(f"{name} {gb(count)}" for name, count in gpu.phases.items())
    rows = [(name.replace("_", " "), gb(count), TERM_MEANINGS.get(name, "")) for name, count in terms]
    caption = f"Terms of the {gpu.phase} phase. Tensors by phase: {phases}."
    table = Table(("term", "size", "meaning"), rows, caption)
    return Section("Memory", charts=(Chart("Prediction and capacity, GB", draw, note),), tables=(table,))


def _plan_time(plan: Plan) -> Section:
    time = plan.chosen.time
    terms = sorted(time.terms.items(), key=lambda item: -item[1])
    drawn = {time_term_name(name): value for name, value in terms if value >= 0.005 * time.seconds}
    note = f"Total {time.seconds:.4f} s ({time.low_seconds:.4f} to {time.high_seconds:.4f} s)."
    chart = Chart("Time of one optimizer step by term, seconds", parts(drawn, "seconds"), note)
    rows = [(time_term_name(name), f"{value:.4f} s", TIME_TERM_MEANINGS.get(name, "")) for name, value in terms]
    return Section("Time of a step", charts=(chart,), tables=(Table(("term", "time", "meaning"), rows),))


def _other_layouts(plan: Plan) -> Section:
    rows = []
    for other in plan.rejected:
        strategy, gpu, name = other.strategy, other.memory.gpu, display_name(other.strategy)
        size = f"{strategy.micro_batch_size}{' recomputed' if strategy.gradient_checkpointing else ''}"
        memory = f"{gb(gpu.peak_bytes)} ({gb_range(gpu.low_bytes, gpu.high_bytes)})"
        speed = significant(other.time.tokens_per_second)
        rows.append((name, size, memory, speed, other.reason.removeprefix(name).strip()))
    headings = ("layout", "micro-batch", "GPU memory", "tokens/s", "why not")
    tables = [Table(headings, rows, "Other layouts; those that fit come first.")]
    if plan.pareto:
        points = [(p.label, significant(p.tokens_per_second), gb(p.high_bytes)) for p in plan.pareto]
        tables.append(Table(("layout", "tokens/s", "needs up to"), points, "From the fastest to the smallest."))
    return Section("Other layouts", tables=tables)


def measurement_report(run: RunMeasurement) -> Report:
    """Return the report of `plan_measurement.json`: each rank, and the fullest one beside the prediction."""
    fullest, predicted, planned, seconds = run.fullest, run.predicted, run.plan, run.step_seconds
    planned_seconds = run.predicted_step_seconds
    memory = [
        (name, prediction, _measured(measured))
        for name, prediction, measured in (
            ("tensors (peak allocated)", gb(predicted.allocated_bytes), fullest.peak_allocated_bytes),
            ("allocator (peak reserved)", gb(predicted.reserved_bytes), fullest.peak_reserved_bytes),
            (
                "device (in use at the end)",
                f"{gb(predicted.peak_bytes)} ({gb_range(predicted.low_bytes, predicted.high_bytes)})",
                fullest.device_used_bytes,
            ),
        )
    ]
    ranks = []
    for rank in run.measured:
        times = ("–" if s is None else f"{s:.4g} s" for s in (rank.median_step_seconds, rank.mean_step_seconds))
        sizes = (_measured(rank.peak_allocated_bytes), _measured(rank.peak_reserved_bytes))
        ranks.append((str(rank.rank), rank.device, *sizes, *times))
    headings = ("rank", "device", "peak allocated", "peak reserved", "median step", "mean step")
    return Report(
        kind="Measured run",
        title=short_name(planned.model),
        subtitle=f"{planned.layout} on {planned.world_size} x {planned.gpu}",
        facts=(
            Fact("Run as planned", "no" if run.differences else "yes"),
            Fact(
                "Tensors on the fullest rank",
                _measured(fullest.peak_allocated_bytes, "not measured"),
                f"predicted {gb(predicted.allocated_bytes)}",
            ),
            Fact(
                "Step, median of the slowest rank",
                "not measured" if seconds is None else f"{significant(seconds, 3)} s",
                "" if planned_seconds is None else f"predicted {significant(planned_seconds, 3)} s",
            ),
            Fact("Ranks and steps", f"{len(run.measured)} × {fullest.steps}"),
        ),
        sections=(
            Section(
                "Predicted and measured",
                [f"Not as planned: {difference}." for difference in run.differences],
                tables=(Table(("", "predicted, with interval", "measured"), memory, "On the fullest rank."),),
            ),
            Section("Ranks", tables=(Table(headings, ranks, "Medians without the first two steps."),)),
        ),
        versions=run.versions,
        files=(FILE_NAME,),
        measures={} if seconds is None else {"seconds per step": seconds},
    )


def _measured(count: int | None, missing: str = "–") -> str:
    return missing if count is None else gb(count)


_RESULTS = {True: "passed", False: "FAILED", None: "not reached"}


def rehearsal_report(data: Mapping[str, Any]) -> Report:
    """Return the report of `rehearsal.json`."""
    plan, checks, ranks = data["plan"], data["checks"], data["ranks"]
    passed = sum(check["passed"] is True for check in checks)
    failed = next((check["name"] for check in checks if check["passed"] is False), None)
    launchers = f"{data['nodes']} launcher{'s' if data['nodes'] > 1 else ''}"
    facts = [
        Fact("Rehearsal", "passed" if data["passed"] else "failed", "" if failed is None else f"at {failed}"),
        Fact("Checks passed", f"{passed} of {len(checks)}"),
        Fact("Ranks and steps", f"{ranks} × {data['steps']}", f"{launchers}, {data['seconds']:.0f} s total"),
    ]
    results = [(check["name"].replace("_", " "), _RESULTS[check["passed"]], check["detail"]) for check in checks]
    sections = [Section("Checks", tables=(Table(("check", "result", "observation"), results),))]
    totals = {
        phase: (sum(roles.values()), sum(size for name, size in data["predicted"][phase].items() if name != "terms"))
        for phase, roles in data["measured"].items()
        if phase in data["predicted"]
    }
    if differences := [100 * (measured / predicted - 1) for measured, predicted in totals.values() if predicted]:
        label, detail = "Tensors, measured against predicted", "largest difference of a phase, fullest rank"
        facts.append(Fact(label, f"{max(differences, key=abs):+.2f} %", detail))
    if totals:
        by_role = [
            (f"{phase}: {role}", f"{count / 1e6:.3f}", f"{data['predicted'][phase].get(role, 0) / 1e6:.3f}")
            for phase in totals
            for role, count in data["measured"][phase].items()
        ]
        if host := data.get("host"):
            totals["layer inputs in host memory"] = host["measured"], host["predicted"]
        by_phase = [
            (
                phase,
                f"{measured / 1e6:.2f}",
                f"{predicted / 1e6:.2f}",
                f"{100 * (measured / predicted - 1):+.2f} %" if predicted else "–",
            )
            for phase, (measured, predicted) in totals.items()
        ]
        note = (
            "Hatched: predicted by the plan's formulas for the same small model. Bytes are counted, not sampled, so "
            "they have no error."
        )
        chart = Chart("Tensors on the fullest rank, MB", stacks(memory_bars(data), "MB of tensors"), note)
        tables = (
            Table(("phase", "measured, MB", "predicted, MB", "difference"), by_phase),
            Table(("phase and role", "measured, MB", "predicted, MB"), by_role, "By role."),
        )
        sections.append(Section("Memory", charts=(chart,), tables=tables))
    losses = [(step + 1, loss) for step, loss in enumerate(data["losses"])]
    if losses:
        draw = curves({"loss": losses}, "nats per token")
        chart = Chart("Loss by step, nats per token", draw, "Mean over the ranks.")
        sections.append(Section("Training", charts=(chart,)))
    if data["changes"]:
        rows = [(change["where"], plain(change["before"]), plain(change["after"])) for change in data["changes"]]
        changes = Table(("value", "in the plan", "rehearsed"), rows)
        sections.append(Section("Scaled to fit this machine", tables=(changes,)))
    return Report(
        kind="Rehearsal",
        title=short_name(plan["model"]),
        subtitle=f"{plan['strategy']}, planned for {plan['hardware']}, on {ranks} CPU ranks with a small model",
        facts=facts,
        sections=sections,
        command=data.get("command", ""),
        versions=data.get("versions", {}),
        files=("rehearsal.json",),
        series={"training loss, nats per token": losses},
        measures={"checks passed": float(passed), "seconds total": data["seconds"]},
    )


def memory_bars(data: Mapping[str, Any]) -> list[tuple[str, Mapping[str, float], bool]]:
    """Return the MB of each phase of a rehearsal by role, measured and predicted, for `stacks`."""
    bars: list[tuple[str, Mapping[str, float], bool]] = []
    for phase, roles in data["measured"].items():
        bars.append((f"{phase}\nmeasured", {role: count / 1e6 for role, count in roles.items()}, False))
        predicted = data["predicted"].get(phase, {}).items()
        bars.append((f"{phase}\npredicted", {role: size / 1e6 for role, size in predicted if role != "terms"}, True))
    return bars


def comparison_report(reports: Mapping[str, Report]) -> Report:
    """Return the report of several runs by directory: figures in columns, curves in one chart."""
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
    sections = [Section("Side by side", tables=(Table(("", *runs), rows),))]
    charts = []
    for title in dict.fromkeys(title for run in runs.values() for title in run.series):
        series = {name: run.series[title] for name, run in runs.items() if run.series.get(title)}
        if series:
            charts.append(Chart(title.capitalize(), curves(series, title)))
    if charts:
        sections.append(Section("By step", charts=charts))
    titles = dict.fromkeys(title for run in runs.values() for title in run.measures)
    measures = [
        (title, *(significant(run.measures[title]) if title in run.measures else "–" for run in runs.values()))
        for title in titles
    ]
    if measures:
        sections.append(Section("Measures", tables=(Table(("", *runs), measures),)))
    packages = {
        package: [run.versions.get(package) for run in runs.values()]
        for package in dict.fromkeys(package for run in runs.values() for package in run.versions)
    }
    made = [Table(("run", "command"), [(name, run.command or "a Python program") for name, run in runs.items()])]
    if different := [(name, *map(plain, each)) for name, each in sorted(packages.items()) if len(set(each)) > 1]:
        made.append(Table(("", *runs), different, "Packages whose versions differ."))
    sections.append(Section("How the runs were made", tables=made))
    return Report(
        kind="Comparison",
        title=" · ".join(runs),
        subtitle=", ".join(dict.fromkeys(run.kind for run in runs.values())),
        facts=[Fact(name, run.facts[0].value, f"{run.facts[0].label}; {run.title}") for name, run in runs.items()],
        sections=sections,
        command=shlex.join(["shardwright", "report", *reports]),
        versions={package: values[0] for package, values in packages.items() if len(set(values)) == 1 and values[0]},
        files=[f"{directory}/{name}" for directory, run in reports.items() for name in run.files],
    )


def numbered(paths: Sequence[str]) -> list[str]:
    """Return a short name for each directory, numbered where two have the same last part.

    >>> numbered(["runs/a", "old/a", "runs/b"])
    ['a (1)', 'a (2)', 'b']
    """
    last = [path.rstrip("/").rpartition("/")[2] or path for path in paths]
    names = [f"{name} ({last[: i + 1].count(name)})" if last.count(name) > 1 else name for i, name in enumerate(last)]
    # matplotlib omits labels that begin with an underscore from legends.
    return [name.lstrip("_") or name for name in names]
