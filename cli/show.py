"""Terminal output: plans, settings and findings as tables and bars."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..ds_configs.memory.estimate import GpuMemory, shown_bytes
from ..ds_configs.plan.plan import Plan
from ..ds_configs.plan.rendering import planned_training_arguments, train_arguments, trainer_line
from ..ds_configs.search.reasons import display_name
from ..ds_configs.search.run_estimates import doubts
from ..ds_configs.specs.job import MODEL_ROLES, TrainingJob
from ..ds_configs.specs.units import gigabytes, human_count
from ..ds_configs.step_time.estimate import term_title
from ..ds_configs.step_time.utilization import utilization
from ..trainers.reports.report import significant

_COLOURS = ("blue", "cyan", "green", "yellow", "magenta", "red", "bright_blue", "bright_green", "bright_magenta")
_BAR_WIDTH, _SHORTEST_BAR = 60, 10
_SHOWN_SHARE = 0.005
_FIRST_ROWS = 3
"""Alternatives on the first screen of a plan."""
_FIRST_TERMS = 3
"""Terms of memory on the first screen."""
_UPPER_BOUND = "Activations and loss are an upper bound from the model's structure."


def console() -> Console:
    """Return a console on stdout; plain text of 120 columns, or of `COLUMNS`, when that is not a terminal."""
    fixed = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(highlight=False, width=120 if fixed else None)


def show_next(*words: object) -> None:
    """Print the next command, if any, on one line, however narrow the terminal is."""
    if words:
        line = shlex.join(str(word) for word in words)
        Console(soft_wrap=True, highlight=False).print(f"Next: {line}", markup=False)


def print_rows(
    out: Console,
    headings: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    title: str = "",
    figures: Sequence[str] = (),
) -> None:
    """Print rows as a table, whose columns are folded if it is too wide, but not `figures`, else not the first one."""
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    whole = figures or headings[:1]
    for heading in headings:
        justify: Literal["left", "right"] = "right" if heading in figures else "left"
        table.add_column(heading, justify=justify, overflow="fold", no_wrap=heading in whole)
    for row in rows:
        table.add_row(*(Text(value) if isinstance(value, str) else value for value in row))
    out.print(table)


def print_figures(out: Console, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows of a name and figures, of which the first is bold."""
    styled: list[Sequence[str | Text]]
    styled = [(name, Text(first, style="bold"), *others) for name, first, *others in rows]
    print_rows(out, headings, styled, figures=headings)


def show_plan(plan: Plan, directory: Path | None, *, output_dir_hint: bool = True, verbose: bool = False) -> None:
    """Print a plan in at most 24 lines of 80 columns: model, layout, reason, memory, time, files and next command.

    `directory` is `None` if its files were not written; `output_dir_hint` then prints how to write them. `verbose` adds
    every term of memory and time, and every alternative.
    """
    out = console()
    model, hardware, chosen = plan.model, plan.hardware, plan.chosen
    size = f"  {human_count(model.parameter_count)} parameters, on {hardware.world_size} x {hardware.gpu}"
    out.print(Text.assemble((model.name, "bold"), size))
    # The reason begins with the name of the layout.
    name = display_name(chosen.layout)
    out.print(Text.assemble(("Chosen  ", "bold green"), (name, "bold"), chosen.reason.removeprefix(name)))
    out.print(memory_bar(chosen.memory.gpu, columns=out.width))
    (_show_terms if verbose else _show_totals)(out, plan)
    rows: list[tuple[str, ...]] = []
    for candidate in plan.rejected[: None if verbose else _FIRST_ROWS]:
        layout, memory = candidate.layout, candidate.memory
        layers = -(-model.dimensions.num_layers // layout.pp)
        recomputed = layout.recomputed_layers(layers)
        recomputation = f"{recomputed}/{layers}" if 0 < recomputed < layers else "all" if recomputed else "none"
        change = 100 * (candidate.time.tokens_per_second / chosen.time.tokens_per_second - 1)
        speed = f"too large: {memory.lacks}" if memory.lacks else f"{change:+.1f} %"
        size = gigabytes(memory.gpu.high_bytes)
        rows.append((display_name(layout), str(layout.micro_batch_size), recomputation, size, speed))
    if rows:
        title = "Alternatives" if verbose else f"Alternatives, {len(rows)} of {len(plan.rejected)}"
        headings = (title, "micro-\nbatch", "recom-\nputed", "GB", "speed vs.\nchosen")
        print_rows(out, headings, rows, figures=headings[1:])
    if directory is not None or output_dir_hint:
        more = "Reasons" if verbose else "Every term and alternative: --verbose; reasons"
        explained = directory or "DIRECTORY, after writing the plan to DIRECTORY"
        out.print(f"{more}: shardwright explain {explained}", markup=False)
    if directory is not None or output_dir_hint:
        from ..plugins.transformers.training_arguments import missing_packages

        packages = missing_packages(planned_training_arguments(plan))
        for argument, package in packages.items():
            out.print(f"Not installed, but needed for {argument}: pip install {package}", markup=False)
        out.print(trainer_line(plan), markup=False)
    if directory is None:
        if output_dir_hint:
            out.print("No files written; pass --output-dir to write", ", ".join(plan.file_names))
        return
    out.print(f"Files in {directory}: {', '.join((*plan.file_names, 'report.html'))}", markup=False)
    # `train` trains no classifiers.
    needs_script = model.architecture.endswith("Classification") and plan.job.task != "reward"
    if hardware.nodes > 1:
        line = [f"{directory}/launch.sh", "MACHINE_RANK", "MAIN_PROCESS_IP"]
        line += ["YOUR_SCRIPT.py"] if needs_script else ["--dataset", "YOUR_DATA", "--output-dir", "OUTPUT"]
    elif needs_script:
        line = ["shardwright", "launch", str(directory), "YOUR_SCRIPT.py"]
    else:
        line = train_arguments(plan, directory=str(directory))
    where = "Run on each node:" if hardware.nodes > 1 else "Run:"
    Console(soft_wrap=True, highlight=False).print(Text.assemble((where, "bold"), f" {shlex.join(line)}"))


def _show_totals(out: Console, plan: Plan) -> None:
    """Print the largest terms of memory, and a line each for the host, the time and each second model."""
    chosen = plan.chosen
    largest = sorted(chosen.memory.gpu.terms.items(), key=lambda item: -item[1])[:_FIRST_TERMS]
    terms = ", ".join(f"{term_title(name)} {gigabytes(count)}" for name, count in largest)
    out.print(f"Peak ({chosen.memory.gpu.phase} phase): {terms} GB", markup=False)
    if plan.activations == "upper bound":
        out.print(_UPPER_BOUND)
    _show_host_and_pools(out, plan)
    for role, choice in chosen.placements.items():
        sizes = f"{gigabytes(choice.gpu_bytes)} GB per accelerator, {gigabytes(choice.host_bytes)} GB per host"
        out.print(f"{role.capitalize()}: {choice.placement}, {sizes}", markup=False)
    time, tokens = chosen.time, f"{chosen.time.tokens_per_second:,.0f} tokens/s"
    seconds, low, high = (significant(value, 3) for value in (time.seconds, time.low_seconds, time.high_seconds))
    less_certain = ", less certain" if doubts(chosen.layout, plan.model, plan.hardware, plan.job) else ""
    out.print(f"Speed{less_certain}: {tokens}{_model_flops(plan)}, {seconds} s per step ({low} to {high})")


def _show_terms(out: Console, plan: Plan) -> None:
    """Print the terms of memory and time, what is less certain, and the placements of second models."""
    hardware, chosen = plan.hardware, plan.chosen
    title = f"Memory per accelerator, {chosen.memory.gpu.phase} phase"
    print_rows(out, (title, "GB"), terms_rows(chosen.memory.gpu.terms), figures=("GB",))
    if plan.activations == "upper bound":
        out.print(_UPPER_BOUND)
    _show_host_and_pools(out, plan)
    out.print()
    title = f"Time per step, {chosen.time.tokens_per_second:,.0f} tokens/s{_model_flops(plan)}"
    time, shown = chosen.time, _SHOWN_SHARE * chosen.time.seconds
    rows: list[tuple[str | Text, str | Text]]
    rows = [(term.title, f"{term.seconds:.4f}") for term in chosen.terms if term.seconds and term.seconds >= shown]
    whole = f"{time.seconds:.4f} ({time.low_seconds:.4f} to {time.high_seconds:.4f})"
    rows.append((Text("total", style="bold"), Text(whole, style="bold")))
    print_rows(out, (title, "seconds"), rows, figures=("seconds",))
    for doubt in doubts(chosen.layout, plan.model, hardware, plan.job):
        out.print(f"Less certain: {doubt}", markup=False)
    for role, choice in chosen.placements.items():
        out.print()
        sizes = f"{gigabytes(choice.gpu_bytes)} GB per GPU, {gigabytes(choice.host_bytes)} GB host memory per node"
        out.print(f"{role.capitalize()} ({sizes}): {choice.reason}", markup=False)


def _show_host_and_pools(out: Console, plan: Plan) -> None:
    """Print what the host holds, and what accelerators show beyond what a step needs."""
    chosen, gpu, host = plan.chosen, plan.chosen.memory.gpu, plan.chosen.memory.host
    shown = shown_bytes(gpu, chosen.layout, plan.model, plan.hardware, plan.job)
    if shown > gpu.peak_bytes:
        freed = gigabytes(shown - gpu.peak_bytes)
        out.print(f"nvidia-smi may show {gigabytes(shown)} GB; torch frees {freed} GB of them when needed")
    used, capacity = gigabytes(host.peak_bytes_per_node), gigabytes(host.capacity_bytes_per_node)
    nvme = f", NVMe {gigabytes(host.nvme_bytes_per_node)} GB" if host.nvme_bytes_per_node else ""
    assumed = " (assumed; --host-memory)" if "host_bytes_per_node" in plan.hardware.assumed else ""
    out.print(f"Host memory {used} of {capacity} GB per node{nvme}{assumed}")


def _model_flops(plan: Plan) -> str:
    """Return the share of the accelerator's peak; nothing for processors."""
    if plan.hardware.gpu == "CPU":
        return ""
    return f", {utilization(plan.chosen.time, plan.model, plan.hardware, plan.job):.0%} MFU"


def memory_bar(gpu: GpuMemory, *, columns: int = 120) -> Text:
    """Return a bar of the accelerator's memory, one colour for each large term, with the interval's end."""
    figures = (
        f" {gigabytes(gpu.peak_bytes)} GB ({gigabytes(gpu.low_bytes)} to {gigabytes(gpu.high_bytes)}) "
        f"of {gigabytes(gpu.capacity_bytes)} GB"
    )
    # A bar of fewer cells is useless; a longer one wraps.
    width = max(_SHORTEST_BAR, min(_BAR_WIDTH, columns - len(figures) - len("[]")))
    scale = max(gpu.capacity_bytes, gpu.high_bytes, sum(max(0, count) for count in gpu.terms.values()), 1)
    full, interval, empty = characters = "█▒·"
    try:
        characters.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        full, interval, empty = "#=."
    bar = Text("[")
    used = 0
    for index, (_, count) in enumerate(sorted(gpu.terms.items(), key=lambda item: -item[1])):
        cells = round((used + count) / scale * width) - round(used / scale * width)
        bar.append(full * cells, style=_COLOURS[index % len(_COLOURS)])
        # Calibration can make the allocator's term negative.
        used += max(0, count)
    high = max(0, round(gpu.high_bytes / scale * width) - round(used / scale * width))
    free = width - round(used / scale * width) - high
    bar.append(interval * high, style="dim")
    bar.append(empty * free + "]")
    bar.append(figures)
    return bar


def terms_rows(terms: Mapping[str, int]) -> list[tuple[Text, Text]]:
    """Return the terms of a memory in GB, the largest first, each in the colour of its part of the bar."""
    ranked = enumerate(sorted(terms.items(), key=lambda item: -item[1]))
    rows = [
        (Text(term_title(name), style=_COLOURS[index % len(_COLOURS)]), Text(gigabytes(count)))
        for index, (name, count) in ranked
    ]
    return [*rows, (Text("total", style="bold"), Text(gigabytes(sum(terms.values())), style="bold"))]


def show_settings(values: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    """Print every setting with the source of its value."""
    rows, chosen = [], TrainingJob().options().keys() - set(MODEL_ROLES)
    for name, value in values.items():
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        if value is None and name in chosen:
            text = "auto"
        rows.append((name, text, origins[name]))
    print_rows(console(), ("setting", "value", "from"), rows, title="Settings")
