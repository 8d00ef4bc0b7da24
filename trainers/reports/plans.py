"""Reports of plans."""

from __future__ import annotations

from collections.abc import Sequence

from ...ds_configs.plan.plan import Plan
from ...ds_configs.search.reasons import display_name
from ...ds_configs.search.run_estimates import doubts
from ...ds_configs.search.tuning import Trial
from ...ds_configs.specs.units import human_count
from .report import Report, Section, Table, figures, gb, interval, short_name, significant


def speed_interval(plan: Plan) -> tuple[float, float]:
    """Return the lowest and highest tokens/s within the interval of the predicted step time."""
    time = plan.chosen.time
    tokens = time.tokens_per_second * time.seconds
    return tokens / time.high_seconds, tokens / time.low_seconds


def plan_report(plan: Plan) -> Report:
    """Return the report of a plan: the selected layout, its memory and time by term, and the other layouts."""
    model, hardware, chosen, layout = plan.model, plan.hardware, plan.chosen, plan.chosen.layout
    gpu, host, time = chosen.memory.gpu, chosen.memory.host, chosen.time
    batch = f"micro-batch {layout.micro_batch_size} × {layout.gradient_accumulation_steps}"
    summary = [
        ("Layout", display_name(layout), batch),
        (
            "Memory per accelerator, predicted",
            gb(gpu.peak_bytes),
            f"{interval(gpu.low_bytes, gpu.high_bytes, gb)}, of {gb(gpu.capacity_bytes)}",
        ),
        (
            "Tokens/s, predicted",
            significant(time.tokens_per_second),
            f"{interval(*speed_interval(plan))}, all ranks together",
        ),
        ("Step, predicted", f"{significant(time.seconds)} s", f"{interval(time.low_seconds, time.high_seconds)} s"),
        ("Host memory per node, predicted", gb(host.peak_bytes_per_node), f"of {gb(host.capacity_bytes_per_node)}"),
    ]
    reasons = [chosen.reason]
    reasons += [f"{role.capitalize()}: {choice.reason}" for role, choice in chosen.placements.items()]
    if plan.activations == "upper bound":
        reasons.append("Activations and loss are an upper bound from the model's structure. The run may need less.")
    reasons += [f"Less certain: {doubt}" for doubt in doubts(layout, model, hardware, plan.job)]
    sections = [Section("Why this layout", reasons)]
    if plan.trials:
        caption = "Spread: longest minus shortest timed step, divided by the median. Tensors: of the fullest rank."
        sections.append(Section("Measured layouts", tables=(Table(*trial_rows(plan.trials), caption),)))
    seconds_of_terms = [(term, term.seconds) for term in chosen.terms if term.seconds is not None]
    step = Table(
        ("term", "time", "meaning"),
        [
            (term.title, f"{seconds:.4f} s", term.meaning)
            for term, seconds in sorted(seconds_of_terms, key=lambda item: -item[1])
        ],
        f"Total {time.seconds:.4f} s ({time.low_seconds:.4f} to {time.high_seconds:.4f} s).",
    )
    phases = ", ".join(f"{name} {gb(count)}" for name, count in gpu.phases.items())
    memory = []
    for place, caption in (
        ("accelerator", f"Terms of the {gpu.phase} phase. Tensors by phase: {phases}."),
        ("host", "Host memory of a node."),
    ):
        sizes = [(term, term.bytes) for term in chosen.terms if term.bytes is not None and term.lives_on == place]
        rows = [(term.title, gb(count), term.meaning) for term, count in sorted(sizes, key=lambda item: -item[1])]
        memory.append(Table(("term", "size", "meaning"), rows, caption))
    others = []
    for other in plan.rejected:
        name, peak = display_name(other.layout), other.memory.gpu
        size = f"{other.layout.micro_batch_size}{' recomputed' if other.layout.gradient_checkpointing else ''}"
        size_range = f"{gb(peak.peak_bytes)} ({interval(peak.low_bytes, peak.high_bytes, gb)})"
        speed = significant(other.time.tokens_per_second)
        others.append((name, size, size_range, speed, other.reason.removeprefix(name).strip()))
    headings = ("layout", "micro-batch", "GPU memory", "tokens/s", "why not")
    sections += [
        Section("Memory", tables=memory),
        Section("Time of a step", tables=(step,)),
        Section("Other layouts", tables=(Table(headings, others, "Other layouts; those that fit come first."),)),
    ]
    return Report(
        kind="Plan",
        title=short_name(model.name),
        subtitle=f"{model.architecture}, {human_count(model.parameter_count)} parameters, on {hardware.world_size} x "
        f"{hardware.gpu} ({gb(hardware.gpu_bytes)} usable each)",
        summary=(figures(summary),),
        sections=sections,
        command=plan.command,
        versions=dict(plan.versions),
        files=("plan.json",),
    )


def trial_rows(trials: Sequence[Trial]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return headings and rows of measured layouts, with predictions."""
    headings = ("layout", "micro-batch", "result", "s per step", "predicted", "spread", "tensors", "predicted tensors")
    rows: list[tuple[str, ...]] = []
    for trial in trials:
        size = f"{trial.layout.micro_batch_size} x {trial.layout.gradient_accumulation_steps}"
        seconds = "–" if trial.step_seconds is None else significant(trial.step_seconds, 3)
        varies = "–" if trial.spread is None else f"{100 * trial.spread:.0f} %"
        measured = "–" if trial.peak_allocated_bytes is None else gb(trial.peak_allocated_bytes)
        result = f"{trial.outcome}: {trial.detail}" if trial.detail else trial.outcome
        predicted = significant(trial.predicted_seconds, 3)
        memory = measured, gb(trial.predicted_allocated_bytes)
        rows.append((trial.name, size, result, seconds, predicted, varies, *memory))
    return headings, rows
