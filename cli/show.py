"""Terminal output: plans, settings and findings as tables and bars."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..ds_configs.check import Finding
from ..ds_configs.memory.estimate import GpuMemory
from ..ds_configs.plan.plan import Plan
from ..ds_configs.plan.rendering import planned_training_arguments, train_arguments, trainer_line
from ..ds_configs.search.reasons import display_name
from ..ds_configs.search.run_estimates import doubts
from ..ds_configs.search.tensor_layouts import TensorLayout
from ..ds_configs.specs.second_models import PlacementChoice
from ..ds_configs.specs.units import gigabytes, human_count
from ..ds_configs.step_time.estimate import StepTime, time_term_name
from ..ds_configs.step_time.utilization import utilization

_COLOURS = ("blue", "cyan", "green", "yellow", "magenta", "red", "bright_blue", "bright_green", "bright_magenta")
_BAR_WIDTH, _SHORTEST_BAR = 60, 10
_SHOWN_SHARE = 0.005
_NARROW = 70
"""Columns below which four columns of figures would be cut into pieces."""
_NARROW_FOR_SPEED = 50
"""Columns below which the alternatives of a plan are listed without their speed."""
_BRIEF_ROWS = 5
"""Alternatives in a brief plan."""


def console() -> Console:
    """Return a console on stdout; plain text of 120 columns, or of `COLUMNS`, when that is not a terminal."""
    fixed = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(highlight=False, width=120 if fixed else None)


def show_next(*words: object) -> None:
    """Print the next command, if any, on one line, however narrow the terminal is."""
    if words:
        line = shlex.join(str(word) for word in words)
        Console(soft_wrap=True, highlight=False).print(f"Next: {line}", markup=False)


def print_compared(out: Console, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows of a name and values, the first value bold; on a narrow terminal as blocks."""
    rows = list(rows)
    if out.width < _NARROW:
        for name, *values in rows:
            out.print(Text(name))
            for heading, value in zip(headings, values, strict=True):
                if value:
                    out.print(Text(f"  {heading}: ") + Text(value, style="bold" if heading == headings[0] else ""))
        return
    lines = [("", *headings), *rows]
    needed = sum(2 + max(map(len, column)) for column in zip(*lines, strict=True))
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", overflow="fold")
    for name, *values in lines[1:]:
        # Standard errors go below their figures if both do not fit on one line.
        first, *others = values if needed <= out.width else [value.replace(" ± ", "\n± ") for value in values]
        table.add_row(name, Text(first, style="bold"), *others)
    out.print(table)


def print_rows(
    out: Console,
    headings: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    title: str = "",
    block_title: str = "",
    figures: Sequence[str] = (),
    folded: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Print rows as a table if it fits, else as blocks: the first value, and the others below it by heading.

    Headings are folded if that makes the table fit. Columns in `figures` are aligned right. Columns in `folded` may be
    folded, down to the given width.
    """
    rows = list(rows)
    cells = [max((len(row[index]) for row in rows), default=0) for index in range(len(headings))]
    cells = [min(width, folded.get(heading, width)) for heading, width in zip(headings, cells, strict=True)]

    def is_too_wide(titles: Sequence[str]) -> bool:
        lines = [max(map(len, title.split("\n"))) for title in titles]
        return sum(map(max, cells, lines)) + 2 * len(titles) - 2 > out.width

    titles = list(headings)
    if is_too_wide(titles):
        titles = [
            "\n".join(wrap(heading, max(1, width), break_long_words=False))
            for heading, width in zip(headings, cells, strict=True)
        ]
    if is_too_wide(titles):
        if above := block_title or title:
            out.print(Text(above, style="italic"))
        for name, *values in rows:
            out.print(Text.assemble((str(name), "bold")), overflow="fold")
            for heading, value in zip(headings[1:], values, strict=True):
                if value:
                    out.print(Padding(Text.assemble(f"{heading}: ", value), (0, 0, 0, 2), expand=False))
        return
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for heading, lines in zip(headings, titles, strict=True):
        table.add_column(lines, justify="right" if heading in figures else "left", no_wrap=heading not in folded)
    for row in rows:
        table.add_row(*(Text(value) if isinstance(value, str) else value for value in row))
    out.print(table)


def show_plan(plan: Plan, directory: Path | None, *, output_dir_hint: bool = True, brief: bool = False) -> None:
    """Print a plan: model, selected layout, memory, time, alternatives, files and launch command.

    `directory` is `None` if its files were not written; `output_dir_hint` then prints how to write them. `brief` ends
    after the reason, the memory and the fastest alternatives.
    """
    out = console()
    model, hardware, chosen = plan.model, plan.hardware, plan.chosen
    summary = (
        f"  {model.architecture}, {human_count(model.parameter_count)} parameters, "
        f"on {hardware.world_size} x {hardware.gpu} ({gigabytes(hardware.gpu_bytes)} GB usable each)"
    )
    out.print(Text.assemble((model.name, "bold"), summary))
    out.print()
    out.print(Text.assemble(("Chosen  ", "bold green"), (display_name(chosen.strategy), "bold")))
    out.print(chosen.reason, markup=False)
    out.print()
    out.print(memory_bar(chosen.memory.gpu, columns=out.width))
    if brief:
        out.print()
        out.print(_alternatives_table(plan, columns=out.width, rows=_BRIEF_ROWS))
        return
    out.print(terms_table(chosen.memory.gpu.terms, f"Memory per accelerator, {chosen.memory.gpu.phase} phase"))
    if plan.activations == "upper bound":
        out.print("Activations and loss are an upper bound from the model's structure. The run may need less.")
    host = chosen.memory.host
    used, capacity = gigabytes(host.peak_bytes_per_node), gigabytes(host.capacity_bytes_per_node)
    host_line = f"Host memory {used} of {capacity} GB per node"
    if host.nvme_bytes_per_node:
        host_line += f", NVMe {gigabytes(host.nvme_bytes_per_node)} GB"
    if "host_bytes_per_node" in plan.hardware.assumed:
        host_line += " (assumed; set yours with --host-memory)"
    out.print(host_line)
    out.print()
    reached = None if hardware.gpu == "CPU" else utilization(chosen.time, model, hardware, plan.job)
    out.print(time_table(chosen.time, reached))
    for doubt in doubts(chosen.strategy, plan.model, hardware, plan.job):
        out.print(f"Less certain: {doubt}", markup=False)
    out.print()
    for role, choice in chosen.placements.items():
        out.print(placement_table(role, choice))
        out.print()
    out.print(_alternatives_table(plan, columns=out.width))
    if directory is not None or output_dir_hint:
        explained = directory or "DIRECTORY, after writing the plan to DIRECTORY"
        out.print(f"Reasons: shardwright explain {explained}", markup=False)
    out.print()
    if directory is not None or output_dir_hint:
        from ..plugins.transformers.training_arguments import missing_packages

        packages = missing_packages(planned_training_arguments(plan))
        for argument, package in packages.items():
            out.print(f"Not installed, but required by {argument} of this plan: {package}", markup=False)
            out.print(f"  pip install {package}", markup=False)
        out.print(trainer_line(plan), markup=False)
    if directory is None:
        if output_dir_hint:
            out.print("No files written; pass --output-dir to write", ", ".join(plan.file_names))
        return
    out.print(f"Files in {directory}: {', '.join(plan.file_names)}", markup=False)
    out.print("Run on each node:" if hardware.nodes > 1 else "Run:", style="bold")
    if hardware.nodes > 1:
        line = [f"{directory}/launch.sh", "MACHINE_RANK", "MAIN_PROCESS_IP"]
        line += ["--dataset", "YOUR_DATA", "--output-dir", "OUTPUT"]
    else:
        line = train_arguments(plan, directory=str(directory))
    Console(soft_wrap=True, highlight=False).print("  " + shlex.join(line), markup=False)


def memory_bar(gpu: GpuMemory, *, columns: int = 120) -> Text:
    """Return a bar of the accelerator's memory, one colour for each large term, with the interval's end."""
    figures = (
        f" {gigabytes(gpu.peak_bytes)} GB ({gigabytes(gpu.low_bytes)} to {gigabytes(gpu.high_bytes)}) "
        f"of {gigabytes(gpu.capacity_bytes)} GB"
    )
    # A bar of fewer cells is useless; a longer one wraps.
    width = max(_SHORTEST_BAR, min(_BAR_WIDTH, columns - len(figures) - len("[]")))
    scale = max(gpu.capacity_bytes, gpu.high_bytes, sum(max(0, count) for count in gpu.terms.values()), 1)
    full, interval, empty = "█▒·" if _encodable("█▒·") else "#=."
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


def _encodable(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def terms_table(terms: Mapping[str, int], title: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(title)
    table.add_column("GB", justify="right")
    for index, (name, count) in enumerate(sorted(terms.items(), key=lambda item: -item[1])):
        table.add_row(Text(name.replace("_", " "), style=_COLOURS[index % len(_COLOURS)]), gigabytes(count))
    table.add_row("total", gigabytes(sum(terms.values())), style="bold")
    return table


def time_table(time: StepTime, reached: float | None = None) -> Table:
    """Return the terms of a step; `reached` is its model FLOPs utilization."""
    table = Table(box=None, pad_edge=False)
    speed = f"Time per step, {time.tokens_per_second:,.0f} tokens/s"
    table.add_column(speed if reached is None else f"{speed}, {reached:.0%} MFU")
    table.add_column("seconds", justify="right")
    for name, seconds in sorted(time.terms.items(), key=lambda item: -item[1]):
        if seconds >= _SHOWN_SHARE * time.seconds:
            table.add_row(time_term_name(name), f"{seconds:.4f}")
    interval = f"{time.seconds:.4f} ({time.low_seconds:.4f} to {time.high_seconds:.4f})"
    table.add_row("total", interval, style="bold")
    return table


def placement_table(role: str, choice: PlacementChoice) -> Table:
    """Return the placement of a second model with its reason, and the costs of the others."""
    table = Table(title=role.capitalize(), title_justify="left", box=None, pad_edge=False)
    table.add_column("placement")
    table.add_column("GPU GB", justify="right", no_wrap=True)
    table.add_column("host GB per node", justify="right")
    table.add_column("why")
    reason = Text(choice.reason.removeprefix(choice.placement).strip())
    row = (choice.placement, gigabytes(choice.gpu_bytes), gigabytes(choice.host_bytes), reason)
    table.add_row(*row, style="bold green")
    for cost in choice.alternatives:
        sizes = (gigabytes(cost.gpu_bytes), gigabytes(cost.host_bytes))
        table.add_row(cost.placement, *sizes, Text(cost.reason))
    return table


def show_tensor_layouts(layouts: Sequence[TensorLayout]) -> None:
    """Print the costs of 1D, 2D, 2.5D and 3D tensor parallelism, of which only 1D runs."""
    out = console()
    title = "Tensor parallelism: one layer, one micro-batch per rank; all but 1D are analysis only"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("ranks", "layout", "weights MB", "activations MB", "received MB", "ms"):
        table.add_column(column, justify="left" if column == "layout" else "right")
    for layout in layouts:
        sizes = (layout.weight_bytes, layout.activation_bytes, layout.communication_bytes)
        shape = " x ".join(map(str, layout.shape))
        table.add_row(
            str(layout.ranks),
            Text(f"{layout.name} {shape}"),
            *(f"{size / 1e6:.1f}" for size in sizes),
            f"{layout.communication_seconds * 1e3:.2f}",
        )
    out.print()
    out.print(table)


def _alternatives_table(plan: Plan, *, columns: int, rows: int | None = None) -> Table:
    """Return the rejected layouts in at most 80 columns; their reasons are printed by `explain`."""
    table = Table(title="Alternatives", title_justify="left", box=None, pad_edge=False)
    table.add_column("layout", overflow="fold")
    wide, medium = columns >= _NARROW, columns >= _NARROW_FOR_SPEED
    if wide:
        table.add_column("micro-\nbatch", justify="right", no_wrap=True)
        table.add_column("recom-\nputation", justify="right", no_wrap=True)
    table.add_column("GB", justify="right", no_wrap=True)
    if medium:
        table.add_column("tokens/s", justify="right", no_wrap=True)
    table.add_column("vs.\nchosen", justify="right", no_wrap=True)
    for candidate in plan.rejected[:rows]:
        strategy, memory = candidate.strategy, candidate.memory
        layers = -(-plan.model.dimensions.num_layers // strategy.pp)
        recomputed = strategy.recomputed_layers(layers)
        recomputation = f"{recomputed}/{layers}" if 0 < recomputed < layers else "all" if recomputed else "none"
        if strategy.gradient_checkpointing and strategy.keeps_products:
            recomputation = "selective"
        change = 100 * (candidate.time.tokens_per_second / plan.chosen.time.tokens_per_second - 1)
        verdict = f"{change:+.1f} %" if memory.lacks is None else "too large"
        if memory.lacks is not None and not medium:
            verdict += f" ({memory.lacks})"
        name = display_name(strategy)
        # A layout that is too large has no speed, but a memory that is too small.
        speed = memory.lacks or f"{candidate.time.tokens_per_second:,.0f}"
        table.add_row(
            name,
            *([str(strategy.micro_batch_size), recomputation] if wide else []),
            gigabytes(memory.gpu.high_bytes),
            *([speed] if medium else []),
            verdict,
        )
    return table


def show_settings(values: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    """Print every setting with the source of its value."""
    out, rows = console(), [(name, str(value), origins[name]) for name, value in values.items()]
    if out.width < _NARROW:
        for name, value, origin in rows:
            out.print(f"{name} = {value} ({origin})", markup=False)
        return
    print_rows(out, ("setting", "value", "from"), rows, title="Settings", folded={"value": 20})


def show_findings(findings: Sequence[Finding]) -> None:
    """Print findings, errors first, each with location, rule and fix."""
    out = console()
    for finding in sorted(findings, key=lambda item: item.kind != "error"):
        style = "bold red" if finding.kind == "error" else "yellow"
        out.print(Text.assemble((f"{finding.kind}: ", style), str(finding.error)))
