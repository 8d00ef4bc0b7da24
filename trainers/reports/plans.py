"""Reports of checks, plans, measured runs of a plan, rehearsals, and comparisons of runs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ...ds_configs.memory.terms import TERM_MEANINGS
from ...ds_configs.plan.measurement import FILE_NAME, RunMeasurement
from ...ds_configs.plan.plan import Plan, job_dict, strategy_dict
from ...ds_configs.search.reasons import display_name
from ...ds_configs.search.run_estimates import doubts
from ...ds_configs.search.search import Evaluated
from ...ds_configs.search.tuning import Trial
from ...ds_configs.specs.units import human_count
from ...ds_configs.step_time.estimate import TIME_TERM_MEANINGS, time_term_name
from ...plugins.planning.from_names import installed_versions
from ..charts import columns, curves, largest_parts, parts, scatter, stacks
from .report import (
    Chart,
    Fact,
    Report,
    Section,
    Table,
    gb,
    gb_range,
    key_value_table,
    plain,
    short_name,
    significant,
)

_SMALLEST_SHARE = 0.005
"""Of the step's time or the memory; smaller terms are in the table only."""
_HARDWARE_FIELDS = (
    "name", "nodes", "gpus_per_node", "gpu", "gpu_bytes", "flops_per_s", "memory_bytes_per_s", "link_bytes_per_s",
    "network_bytes_per_s", "host_bytes_per_node", "source",
)  # fmt: skip


def check_report(data: Mapping[str, Any], *, command: str) -> Report:
    """Return the report of the JSON output of `check`."""
    findings = sorted(data["findings"], key=lambda finding: finding["kind"] != "error")
    errors, files = data["errors"], data["files"]
    rows = [
        (finding["kind"], finding["where"], plain(finding["value"])[:200], finding["rule"], plain(finding["fix"]))
        for finding in findings
    ]
    table = Table(headings=("severity", "location", "value", "rule", "fix"), rows=rows, numeric=False)
    listed = Table(headings=("file",), rows=[(name,) for name in files], numeric=False)
    return Report(
        kind="Check",
        title=", ".join(files[:3]) + (" and more" if len(files) > 3 else ""),
        subtitle="DeepSpeed and Accelerate configuration",
        facts=(
            Fact(label="Errors", value=str(errors), state="bad" if errors else "good"),
            Fact(label="Warnings", value=str(len(findings) - errors)),
            Fact(label="Files", value=str(len(files))),
        ),
        sections=(
            Section(heading="Findings", tables=(table,))
            if rows
            else Section(heading="Findings", texts=("No errors and no warnings.",)),
            Section(heading="Files checked", tables=(listed,)),
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
                label="Layout",
                value=display_name(strategy),
                detail=f"micro-batch {strategy.micro_batch_size} × {strategy.gradient_accumulation_steps}",
            ),
            Fact(
                label="Memory per accelerator, predicted",
                value=gb(gpu.peak_bytes),
                detail=f"{gb_range(gpu.low_bytes, gpu.high_bytes)}, of {gb(gpu.capacity_bytes)}",
                state="good" if gpu.high_bytes <= gpu.capacity_bytes else "bad",
            ),
            Fact(
                label="Tokens/s, predicted",
                value=significant(time.tokens_per_second),
                detail=f"{significant(low)} to {significant(high)}, all ranks together",
            ),
            Fact(
                label="Step, predicted",
                value=f"{significant(time.seconds, 3)} s",
                detail=f"{significant(time.low_seconds, 3)} to {significant(time.high_seconds, 3)} s",
            ),
            Fact(
                label="Host memory per node, predicted",
                value=gb(host.peak_bytes_per_node),
                detail=f"of {gb(host.capacity_bytes_per_node)}",
            ),
        ),
        sections=(
            Section(heading="Why this layout", texts=reasons),
            *([_trials(plan.trials)] if plan.trials else []),
            _plan_memory(plan),
            _plan_time(plan),
            _other_layouts(plan),
            _plan_settings(plan),
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
    chart = Chart(title="Step by layout, predicted and measured, seconds", draw=stacks(bars, "seconds"), note=note)
    caption = "Spread: longest minus shortest timed step, divided by the median. Tensors: of the fullest rank."
    return Section(
        heading="Measured layouts",
        charts=(chart,) if bars else (),
        tables=(Table(headings=headings, rows=rows, caption=caption, numeric=False),),
    )


def _plan_memory(plan: Plan) -> Section:
    gpu = plan.chosen.memory.gpu
    terms = sorted(gpu.terms.items(), key=lambda item: -item[1])
    drawn = {name.replace("_", " "): count / 1e9 for name, count in terms if count >= _SMALLEST_SHARE * gpu.peak_bytes}
    bar = largest_parts({name.replace("_", " "): count / 1e9 for name, count in terms})
    limit, interval = ("capacity", gpu.capacity_bytes / 1e9), (gpu.low_bytes / 1e9, gpu.high_bytes / 1e9)
    phases = ", ".join(f"{name} {gb(count)}" for name, count in gpu.phases.items())
    return Section(
        heading="Memory",
        charts=(
            Chart(
                title="Prediction and capacity, GB",
                draw=stacks([("predicted", bar, False)], "GB", limit=limit, ranges={0: interval}),
                note="The bracket is the interval of the prediction. A layout is selected only if its upper end fits.",
            ),
            Chart(
                title="Memory per accelerator by term, GB",
                draw=parts(drawn, "GB"),
                note=f"Total {gb(gpu.peak_bytes)} ({gb_range(gpu.low_bytes, gpu.high_bytes)}) in the {gpu.phase} "
                "phase, which needs the most.",
            ),
        ),
        tables=(
            Table(
                headings=("term", "size", "meaning"),
                rows=[(name.replace("_", " "), gb(count), TERM_MEANINGS.get(name, "")) for name, count in terms],
                caption=f"Terms of the {gpu.phase} phase. Tensors by phase: {phases}.",
                numeric=False,
            ),
        ),
    )


def _plan_time(plan: Plan) -> Section:
    def point(layout: Evaluated) -> tuple[float, float]:
        return layout.memory.gpu.high_bytes / 1e9, layout.time.tokens_per_second

    time, capacity = plan.chosen.time, plan.hardware.gpu_bytes
    terms = sorted(time.terms.items(), key=lambda item: -item[1])
    drawn = {time_term_name(name): value for name, value in terms if value >= _SMALLEST_SHARE * time.seconds}
    layouts = {
        "selected": [point(plan.chosen)],
        "fastest to smallest": [(point.high_bytes / 1e9, point.tokens_per_second) for point in plan.pareto],
        "other layouts that fit": [point(other) for other in plan.rejected if other.memory.fits],
    }
    axis = "GB per accelerator, upper end of the interval"
    return Section(
        heading="Time of a step",
        charts=(
            Chart(
                title="Time of one optimizer step by term, seconds",
                draw=parts(drawn, "seconds"),
                note=f"Total {time.seconds:.4f} s ({time.low_seconds:.4f} to {time.high_seconds:.4f} s).",
            ),
            Chart(
                title="All layouts: tokens/s against memory",
                draw=scatter(layouts, axis, "tokens/s", limit=("capacity", capacity / 1e9)),
                note="No other layout is both faster and smaller than a point of the second group.",
            ),
        ),
        tables=(
            Table(
                headings=("term", "time", "meaning"),
                rows=[
                    (time_term_name(name), f"{value:.4f} s", TIME_TERM_MEANINGS.get(name, "")) for name, value in terms
                ],
                numeric=False,
            ),
        ),
    )


def _other_layouts(plan: Plan) -> Section:
    rows = []
    for other in plan.rejected:
        strategy, gpu, name = other.strategy, other.memory.gpu, display_name(other.strategy)
        size = f"{strategy.micro_batch_size}{' recomputed' if strategy.gradient_checkpointing else ''}"
        memory = f"{gb(gpu.peak_bytes)} ({gb_range(gpu.low_bytes, gpu.high_bytes)})"
        speed = significant(other.time.tokens_per_second)
        rows.append((name, size, memory, speed, other.reason.removeprefix(name).strip()))
    headings = ("layout", "micro-batch", "GPU memory", "tokens/s", "why not")
    tables = [Table(headings=headings, rows=rows, numeric=False, caption="Other layouts; those that fit come first.")]
    if plan.pareto:
        points = [(p.label, significant(p.tokens_per_second), gb(p.high_bytes)) for p in plan.pareto]
        caption = "From the fastest to the smallest."
        tables.append(Table(headings=("layout", "tokens/s", "needs up to"), rows=points, caption=caption))
    return Section(heading="Other layouts", tables=tables)


def _plan_settings(plan: Plan) -> Section:
    teacher = None if plan.job.teacher is None else plan.job.teacher.name
    job = {"model": plan.model.name} | job_dict(plan.job) | {"teacher": teacher}
    strategy: dict[str, object] = {}
    for name, value in strategy_dict(plan.chosen.strategy).items():
        strategy |= value if isinstance(value, dict) else {name: value}
    hardware = [
        (name, plain(getattr(plan.hardware, name)) + (" (assumed)" if name in plan.hardware.assumed else ""))
        for name in _HARDWARE_FIELDS
    ]
    tables = [
        key_value_table([(name.replace("_", " "), value) for name, value in values], caption)
        for caption, values in (("Job", job.items()), ("Strategy", strategy.items()), ("Hardware", hardware))
    ]
    return Section(heading="All settings", tables=tables, folded=True)


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
    ranks, medians = [], {}
    for rank in run.measured:
        times = ("–" if s is None else f"{s:.4g} s" for s in (rank.median_step_seconds, rank.mean_step_seconds))
        sizes = (_measured(rank.peak_allocated_bytes), _measured(rank.peak_reserved_bytes))
        ranks.append((str(rank.rank), rank.device, *sizes, *times))
        if rank.median_step_seconds is not None:
            medians[f"rank {rank.rank}"] = rank.median_step_seconds
    draw, note = columns(medians, "seconds"), "Medians without the first two steps."
    headings = ("rank", "device", "peak allocated", "peak reserved", "median step", "mean step")
    return Report(
        kind="Measured run",
        title=short_name(planned.model),
        subtitle=f"{planned.layout} on {planned.world_size} x {planned.gpu}",
        facts=(
            Fact(
                label="Run as planned",
                value="no" if run.differences else "yes",
                state="bad" if run.differences else "good",
            ),
            Fact(
                label="Tensors on the fullest rank",
                value=_measured(fullest.peak_allocated_bytes, "not measured"),
                detail=f"predicted {gb(predicted.allocated_bytes)}",
            ),
            Fact(
                label="Step, median of the slowest rank",
                value="not measured" if seconds is None else f"{significant(seconds, 3)} s",
                detail="" if planned_seconds is None else f"predicted {significant(planned_seconds, 3)} s",
            ),
            Fact(label="Ranks and steps", value=f"{len(run.measured)} × {fullest.steps}"),
        ),
        sections=(
            Section(
                heading="Predicted and measured",
                texts=[f"Not as planned: {difference}." for difference in run.differences],
                tables=(
                    Table(
                        headings=("", "predicted, with interval", "measured"),
                        rows=memory,
                        caption="On the fullest rank.",
                    ),
                ),
            ),
            Section(
                heading="Ranks",
                charts=(Chart(title="Step by rank, seconds", draw=draw, note=note),) if 1 < len(medians) <= 16 else (),
                tables=(Table(headings=headings, rows=ranks),),
            ),
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
        Fact(
            label="Rehearsal",
            value="passed" if data["passed"] else "failed",
            detail="" if failed is None else f"at {failed}",
            state="good" if data["passed"] else "bad",
        ),
        Fact(label="Checks passed", value=f"{passed} of {len(checks)}"),
        Fact(
            label="Ranks and steps",
            value=f"{ranks} × {data['steps']}",
            detail=f"{launchers}, {data['seconds']:.0f} s total",
        ),
    ]
    results = [(check["name"].replace("_", " "), _RESULTS[check["passed"]], check["detail"]) for check in checks]
    checked = Table(headings=("check", "result", "observation"), rows=results, numeric=False)
    sections = [Section(heading="Checks", tables=(checked,))]
    totals = [
        (phase, sum(roles.values()), sum(size for role, size in data["predicted"][phase].items() if role != "terms"))
        for phase, roles in data["measured"].items()
        if phase in data["predicted"]
    ]
    differences = {phase: 100 * (measured / predicted - 1) for phase, measured, predicted in totals if predicted}
    if differences:
        facts.append(
            Fact(
                label="Tensors, measured against predicted",
                value=f"{max(differences.values(), key=abs):+.2f} %",
                detail="largest difference of a phase, fullest rank",
            )
        )
    if totals:
        by_phase = [
            (phase, f"{measured / 1e6:.2f}", f"{predicted / 1e6:.2f}",
             f"{differences[phase]:+.2f} %" if phase in differences else "–")
            for phase, measured, predicted in totals
        ]  # fmt: skip
        if host := data.get("host"):
            difference = f"{100 * (host['measured'] / host['predicted'] - 1):+.2f} %" if host["predicted"] else "–"
            measured, predicted = (f"{host[name] / 1e6:.2f}" for name in ("measured", "predicted"))
            by_phase.append(("layer inputs in host memory", measured, predicted, difference))
        by_role = [
            (f"{phase}: {role}", f"{count / 1e6:.3f}", f"{data['predicted'][phase].get(role, 0) / 1e6:.3f}")
            for phase, _, _ in totals
            for role, count in data["measured"][phase].items()
        ]
        headings = ("phase and role", "measured, MB", "predicted, MB")
        sections.append(
            Section(
                heading="Memory",
                charts=(
                    Chart(
                        title="Tensors on the fullest rank, MB",
                        draw=stacks(memory_bars(data), "MB of tensors"),
                        note="Hatched: predicted by the plan's formulas for the same small model. "
                        "Bytes are counted, not sampled, so they have no error.",
                    ),
                ),
                tables=(
                    Table(headings=("phase", "measured, MB", "predicted, MB", "difference"), rows=by_phase),
                    Table(headings=headings, rows=by_role, caption="By role."),
                ),
            )
        )
    losses = [(step + 1, loss) for step, loss in enumerate(data["losses"])]
    if losses:
        draw = curves({"loss": losses}, "nats per token")
        chart = Chart(title="Loss by step, nats per token", draw=draw, note="Mean over the ranks.")
        sections.append(Section(heading="Training", charts=(chart,)))
    if data["changes"]:
        rows = [(change["where"], plain(change["before"]), plain(change["after"])) for change in data["changes"]]
        changes = Table(headings=("value", "in the plan", "rehearsed"), rows=rows, numeric=False)
        sections.append(Section(heading="Scaled to fit this machine", tables=(changes,), folded=True))
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
    sections = [Section(heading="Side by side", tables=(Table(headings=("", *runs), rows=rows, numeric=False),))]
    charts = []
    for title in dict.fromkeys(title for run in runs.values() for title in run.series):
        series = {name: run.series[title] for name, run in runs.items() if run.series.get(title)}
        if series:
            charts.append(Chart(title=title.capitalize(), draw=curves(series, title)))
    if charts:
        sections.append(Section(heading="By step", charts=charts))
    bars, measures = [], []
    for title in dict.fromkeys(title for run in runs.values() for title in run.measures):
        values = {name: run.measures[title] for name, run in runs.items() if title in run.measures}
        measures.append((title, *(significant(values[name]) if name in values else "–" for name in runs)))
        if len(values) > 1:
            bars.append(Chart(title=title.capitalize(), draw=columns(values, title)))
    if measures:
        sections.append(Section(heading="Measures", charts=bars, tables=(Table(headings=("", *runs), rows=measures),)))
    packages = {
        package: [run.versions.get(package) for run in runs.values()]
        for package in dict.fromkeys(package for run in runs.values() for package in run.versions)
    }
    different = [
        (package, *map(plain, versions)) for package, versions in sorted(packages.items()) if len(set(versions)) > 1
    ]
    commands = [(name, run.command or "a Python program") for name, run in runs.items()]
    made = [Table(headings=("run", "command"), rows=commands, numeric=False)]
    if different:
        caption = "Packages whose versions differ."
        made.append(Table(headings=("", *runs), rows=different, caption=caption, numeric=False))
    sections.append(Section(heading="How the runs were made", tables=made))
    return Report(
        kind="Comparison",
        title=" · ".join(runs),
        subtitle=", ".join(dict.fromkeys(run.kind for run in runs.values())),
        facts=[
            Fact(label=name, value=run.facts[0].value, detail=f"{run.facts[0].label}; {run.title}")
            for name, run in runs.items()
        ],
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
