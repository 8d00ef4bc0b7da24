"""Plans in a notebook: a summary line, rows of all layouts, and HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from ..search.search import Evaluated
from ..specs.units import gigabytes
from .rendering import LaunchSpec

_COLUMNS = ("layout", "micro_batch_size", "peak_GB", "high_GB", "tokens_per_second", "reason")

_ROLE_COLORS = {
    "weights": "#4477aa",
    "optimizer": "#66ccee",
    "gradients": "#228833",
    "activations": "#ccbb44",
    "buckets": "#ee6677",
    "other": "#aa3377",
}
"""Paul Tol's bright scheme, which is safe for colour-blind readers."""
_ROLE_WORDS = {"other": "runtime and communicators"}
_INTERVAL_COLOR = "#bbbbbb"
_KEY = "display:inline-block;width:0.8em;height:0.8em;margin-right:0.3em;border:1px solid #888"


def plan_line(plan: LaunchSpec) -> str:
    """Return model, hardware, chosen layout and memory in one line."""
    strategy, gpu = plan.chosen.strategy, plan.chosen.memory.gpu
    return (
        f"<Plan {plan.model.name} on {plan.hardware.name}: {strategy.label}, micro-batch {strategy.micro_batch_size} x "
        f"{strategy.gradient_accumulation_steps}, {gigabytes(gpu.peak_bytes)} of {gigabytes(gpu.capacity_bytes)} GB>"
    )


def plan_rows(plan: LaunchSpec, rejected: Iterable[Evaluated]) -> list[dict[str, object]]:
    """Return the chosen layout and then the others, with memory in GB, tokens/s of all ranks and the reason."""
    rows = []
    for layout in (plan.chosen, *rejected):
        gpu = layout.memory.gpu
        values = (
            layout.strategy.label,
            layout.strategy.micro_batch_size,
            gpu.peak_bytes / 1e9,
            gpu.high_bytes / 1e9,
            layout.time.tokens_per_second,
            layout.reason,
        )
        rows.append(dict(zip(_COLUMNS, values, strict=True)))
    return rows


def plan_html(plan: LaunchSpec, rejected: Iterable[Evaluated]) -> str:
    """Return the plan for a notebook: summary line, memory bar with legend, reason, and a table of layouts.

    All text is escaped, because model names are untrusted.
    """
    headings = [name.replace("_", " ") for name in _COLUMNS]
    rows = [
        [
            f"{value:,.{0 if name == 'tokens_per_second' else 1}f}" if isinstance(value, float) else str(value)
            for name, value in row.items()
        ]
        for row in plan_rows(plan, rejected)
    ]
    rows[0][-1] = "chosen"
    line, reason = escape(plan_line(plan).strip("<>")), escape(plan.chosen.reason)
    return f"<p><b>{line}</b></p>{_memory_bar(plan)}<p>{reason}</p>{_table(headings, rows)}"


def _memory_bar(plan: LaunchSpec) -> str:
    """Return a bar of the accelerator's capacity with used memory by role, the interval above it, and a legend."""
    gpu = plan.chosen.memory.gpu
    by_role = dict.fromkeys(_ROLE_COLORS, 0)
    for term in plan.chosen.terms:
        if term.lives_on == "accelerator" and term.bytes is not None:
            by_role[term.role] += term.bytes
    # Calibration can make the allocator's share negative.
    filled = [(role, count) for role, count in by_role.items() if count > 0]
    stops, end = [], 0.0
    parts = [(_ROLE_COLORS[role], count) for role, count in filled]
    for color, count in (*parts, (_INTERVAL_COLOR, gpu.high_bytes - gpu.peak_bytes)):
        start, end = end, min(100.0, end + 100 * count / gpu.capacity_bytes)
        stops.append(f"{color} {start:.1f}% {end:.1f}%")
    stops.append(f"transparent {end:.1f}%")
    legend = [(_ROLE_COLORS[role], f"{_ROLE_WORDS.get(role, role)} {gigabytes(count)}") for role, count in filled]
    legend.append((_INTERVAL_COLOR, f"up to {gigabytes(gpu.high_bytes)} in the interval"))
    legend.append(("transparent", f"free, of {gigabytes(gpu.capacity_bytes)} GB"))
    keys = "".join(
        f'<span style="white-space:nowrap;margin-right:1em"><span style="{_KEY};background:{color}"></span>'
        f"{escape(text)}</span> "
        for color, text in legend
    )
    bar = f'<div style="border:1px solid #888;background:linear-gradient(to right,{",".join(stops)})">&nbsp;</div>'
    title = f"Memory of an accelerator in the {gpu.phase} phase, GB"
    return f'<div style="max-width:40em">{escape(title)}{bar}<div style="font-size:smaller">{keys}</div></div>'


def result_html(line: str, headings: Sequence[str], rows: Iterable[Sequence[str]], *paragraphs: str) -> str:
    """Return a result for a notebook: a line, a table and paragraphs, with all text escaped."""
    below = "".join(f"<p>{escape(paragraph)}</p>" for paragraph in paragraphs)
    return f"<p><b>{escape(line)}</b></p>{_table(headings, rows)}{below}"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    # Notebooks right-align all columns; text is aligned on the left.
    lines = [list(cells) for cells in rows]
    texts = [any(line[column][:1].isalpha() for line in lines) for column in range(len(headings))]

    def row(cells: Sequence[str], kind: str) -> str:
        styles = (' style="text-align:left"' if text else "" for text in texts)
        cells_html = (f"<{kind}{style}>{escape(cell)}</{kind}>" for cell, style in zip(cells, styles, strict=True))
        return f"<tr>{''.join(cells_html)}</tr>"

    return f"<table>{row(headings, 'th')}{''.join(row(cells, 'td') for cells in lines)}</table>"
