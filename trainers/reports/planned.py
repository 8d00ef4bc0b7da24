"""Page of a plan."""

from __future__ import annotations

from ...ds_configs.memory.terms import TERM_MEANINGS
from ...ds_configs.plan.plan import Plan
from ...ds_configs.search.choice import Evaluated
from ...ds_configs.search.questions import doubts
from ...ds_configs.search.reasons import display_name
from ...ds_configs.specs.units import human_count
from ...ds_configs.step_time.terms import TIME_TERM_MEANINGS, time_term_name
from ..charts.kinds import largest_parts, parts, scatter, stacks
from .page import Chart, Page, Section, Table, Tile
from .words import gb, gb_range, plain, short_name, significant

_LEAST_SHARE = 0.005
"""Of the step's time or the memory; smaller terms stand in the table alone."""


def plan_page(plan: Plan) -> Page:
    """Return the report of a plan: the choice, its memory and time by term, and every layout beside it."""
    model, hardware, chosen = plan.model, plan.hardware, plan.chosen
    gpu = chosen.memory.gpu
    return Page(
        kind="Plan",
        title=short_name(model.name),
        subtitle=f"{model.architecture}, {human_count(model.parameter_count)} parameters, on {hardware.world_size} x "
        f"{hardware.gpu} ({gb(hardware.gpu_bytes)} usable each)",
        tiles=plan_tiles(plan),
        sections=(
            Section(heading="Why this layout", texts=_reasons(plan)),
            _memory(plan),
            _time(plan),
            _layouts(plan),
            _settings(plan),
        ),
        command=plan.command,
        versions=dict(plan.versions),
        files=("plan.json",),
        measures={
            "predicted memory of an accelerator, GB": gpu.peak_bytes / 1e9,
            "predicted tokens/s": chosen.time.tokens_per_second,
        },
    )


def plan_tiles(plan: Plan) -> tuple[Tile, ...]:
    """Return the figures that decide."""
    chosen, strategy = plan.chosen, plan.chosen.strategy
    gpu, time = chosen.memory.gpu, chosen.time
    batch = f"micro-batch {strategy.micro_batch_size} × {strategy.gradient_accumulation_steps}"
    memory = f"{gb_range(gpu.low_bytes, gpu.high_bytes)}, of {gb(gpu.capacity_bytes)}"
    state = "good" if gpu.high_bytes <= gpu.capacity_bytes else "bad"
    return (
        Tile(label="Layout", value=display_name(strategy), detail=batch),
        Tile(label="Memory of an accelerator, predicted", value=gb(gpu.peak_bytes), detail=memory, state=state),
        Tile(label="Tokens/s, predicted", value=significant(time.tokens_per_second), detail=_speed_interval(plan)),
        Tile(
            label="Step, predicted",
            value=f"{significant(time.seconds, 3)} s",
            detail=f"{significant(time.low_seconds, 3)} to {significant(time.high_seconds, 3)} s",
        ),
        Tile(
            label="Host memory of a node, predicted",
            value=gb(chosen.memory.host.peak_bytes_per_node),
            detail=f"of {gb(chosen.memory.host.capacity_bytes_per_node)}",
        ),
    )


def _speed_interval(plan: Plan) -> str:
    low, high = speed_interval(plan)
    return f"{significant(low)} to {significant(high)}, all ranks together"


def speed_interval(plan: Plan) -> tuple[float, float]:
    """Return the least and most tokens/s that the interval of the step's time allows."""
    time = plan.chosen.time
    return time.tokens_per_second * time.seconds / time.high_seconds, (
        time.tokens_per_second * time.seconds / time.low_seconds
    )


def _reasons(plan: Plan) -> tuple[str, ...]:
    texts = [plan.chosen.reason]
    if plan.chosen.teacher is not None:
        texts.append(f"Teacher: {plan.chosen.teacher.reason}")
    if plan.activations == "upper bound":
        texts.append("Activations and loss are an upper bound from the model's structure: less may be needed.")
    texts += [f"Changes the numbers: {offer}" for offer in plan.offers]
    texts += [f"Less sure: {doubt}" for doubt in doubts(plan.chosen.strategy, plan.model, plan.hardware, plan.job)]
    return tuple(texts)


def _memory(plan: Plan) -> Section:
    gpu = plan.chosen.memory.gpu
    terms = sorted(gpu.terms.items(), key=lambda item: -item[1])
    shown = {name.replace("_", " "): count / 1e9 for name, count in terms if count >= _LEAST_SHARE * gpu.peak_bytes}
    rows = [(name.replace("_", " "), gb(count), TERM_MEANINGS.get(name, "")) for name, count in terms]
    phases = ", ".join(f"{name} {gb(count)}" for name, count in gpu.phases.items())
    chart = Chart(
        title="Memory of an accelerator by term, GB",
        draw=parts(shown, "GB"),
        note=f"Together {gb(gpu.peak_bytes)} ({gb_range(gpu.low_bytes, gpu.high_bytes)}) in the {gpu.phase} phase, "
        "the fullest.",
    )
    whole = Chart(
        title="Prediction and capacity, GB",
        draw=stacks(
            [("predicted", largest_parts({name.replace("_", " "): count / 1e9 for name, count in terms}), False)],
            "GB",
            limit=("capacity", gpu.capacity_bytes / 1e9),
            ranges={0: (gpu.low_bytes / 1e9, gpu.high_bytes / 1e9)},
        ),
        note="The bracket is the interval of the prediction; a layout is taken only where its upper end fits.",
    )
    caption = f"Terms of the {gpu.phase} phase. Tensors by phase: {phases}."
    table = Table(headings=("term", "size", "what it is"), rows=rows, caption=caption, figures=False)
    return Section(heading="Memory", charts=(whole, chart), tables=(table,))


def _time(plan: Plan) -> Section:
    time = plan.chosen.time
    terms = sorted(time.terms.items(), key=lambda item: -item[1])
    shown = {time_term_name(name): value for name, value in terms if value >= _LEAST_SHARE * time.seconds}
    rows = [(time_term_name(name), f"{value:.4f} s", TIME_TERM_MEANINGS.get(name, "")) for name, value in terms]
    interval = f"{time.low_seconds:.4f} to {time.high_seconds:.4f} s"
    chart = Chart(
        title="Time of one optimizer step by term, seconds",
        draw=parts(shown, "seconds"),
        note=f"Together {time.seconds:.4f} s ({interval}).",
    )
    table = Table(headings=("term", "time", "what it is"), rows=rows, figures=False)
    return Section(heading="Time of a step", charts=(chart, _pareto(plan)), tables=(table,))


def _pareto(plan: Plan) -> Chart:
    def place(layout: Evaluated) -> tuple[float, float]:
        return layout.memory.gpu.high_bytes / 1e9, layout.time.tokens_per_second

    fitting = [other for other in plan.rejected if other.memory.gpu.high_bytes <= plan.hardware.gpu_bytes]
    groups = {
        "chosen": [place(plan.chosen)],
        "fastest to leanest": [(point.high_bytes / 1e9, point.tokens_per_second) for point in plan.pareto],
        "other layouts that fit": [place(other) for other in fitting],
    }
    return Chart(
        title="All layouts: tokens/s against memory",
        draw=scatter(
            groups,
            "GB of an accelerator, upper end of the interval",
            "tokens/s",
            limit=("capacity", plan.hardware.gpu_bytes / 1e9),
        ),
        note="No other layout beats a point of the second group in both.",
    )


def _layouts(plan: Plan) -> Section:
    headings = ("layout", "micro-batch", "memory", "tokens/s", "why not")
    rows = []
    for other in plan.rejected:
        strategy, gpu = other.strategy, other.memory.gpu
        name = display_name(strategy)
        size = f"{strategy.micro_batch_size}{' recomputed' if strategy.gradient_checkpointing else ''}"
        memory = f"{gb(gpu.peak_bytes)} ({gb_range(gpu.low_bytes, gpu.high_bytes)})"
        reason = other.reason.removeprefix(name).strip()
        rows.append((name, size, memory, significant(other.time.tokens_per_second), reason))
    points = [(p.label, significant(p.tokens_per_second), gb(p.high_bytes)) for p in plan.pareto]
    pareto = Table(
        headings=("layout", "tokens/s", "needs up to"), rows=points, caption="From the fastest to the leanest."
    )
    table = Table(headings=headings, rows=rows, figures=False, caption="Other layouts, those that fit first.")
    return Section(heading="Other layouts", tables=(table, pareto) if points else (table,))


def _settings(plan: Plan) -> Section:
    from ...ds_configs.plan.plan_json import job_dict, strategy_dict

    hardware = [
        (name.replace("_", " "), plain(getattr(plan.hardware, name)) + assumed)
        for name in ("name", "nodes", "gpus_per_node", "gpu", "gpu_bytes", "flops_per_s", "memory_bytes_per_s",
                     "link_bytes_per_s", "network_bytes_per_s", "host_bytes_per_node", "source")
        for assumed in [" (assumed)" if name in plan.hardware.assumed else ""]
    ]  # fmt: skip
    job = (
        {"model": plan.model.name}
        | job_dict(plan.job)
        | {"teacher": None if plan.job.teacher is None else plan.job.teacher.name}
    )
    strategy = _flat(strategy_dict(plan.chosen.strategy))
    tables = [
        Table(headings=("", "value"), rows=rows, caption=caption, figures=False)
        for caption, rows in (
            ("Job", [(name.replace("_", " "), plain(value)) for name, value in job.items()]),
            ("Strategy", [(name.replace("_", " "), plain(value)) for name, value in strategy]),
            ("Hardware", hardware),
        )
    ]
    return Section(heading="Settings in full", tables=tables, folded=True)


def _flat(values: dict[str, object]) -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for name, value in values.items():
        found += list(value.items()) if isinstance(value, dict) else [(name, value)]
    return found
