"""A plan in a notebook: one line, a table of all layouts as rows, and that table as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from ..memory.terms import TERM_ROLES
from ..search.choice import Evaluated
from ..specs.units import gigabytes
from .plan import Plan

_COLUMNS = ("layout", "micro_batch_size", "peak_GB", "high_GB", "tokens_per_second", "reason")

_ROLE_COLORS = {
    "weights": "#4477aa",
    "optimizer": "#66ccee",
    "gradients": "#228833",
    "activations": "#ccbb44",
    "buckets": "#ee6677",
    "other": "#aa3377",
}
"""Paul Tol's bright scheme, whose colours people tell apart who see fewer."""
_ROLE_WORDS = {"other": "runtime and communicators"}
_INTERVAL_COLOR = "#bbbbbb"
_KEY = "display:inline-block;width:0.8em;height:0.8em;margin-right:0.3em;border:1px solid #888"


def plan_line(plan: Plan) -> str:
    """Return what was chosen for what, in one line."""
    strategy, gpu = plan.chosen.strategy, plan.chosen.memory.gpu
    return (
        f"<Plan {plan.model.name} on {plan.hardware.name}: {strategy.label}, micro-batch {strategy.micro_batch_size} x "
        f"{strategy.gradient_accumulation_steps}, {gigabytes(gpu.peak_bytes)} of {gigabytes(gpu.capacity_bytes)} GB>"
    )


def plan_rows(plan: Plan) -> list[dict[str, Any]]:
    """Return the chosen layout and then the others, with memory in GB, tokens/s of all ranks and the reason."""
    return [_row(layout) for layout in (plan.chosen, *plan.rejected)]


def _row(layout: Evaluated) -> dict[str, Any]:
    gpu = layout.memory.gpu
    values = (
        layout.strategy.label,
        layout.strategy.micro_batch_size,
        gpu.peak_bytes / 1e9,
        gpu.high_bytes / 1e9,
        layout.time.tokens_per_second,
        layout.reason,
    )
    return dict(zip(_COLUMNS, values, strict=True))


def plan_html(plan: Plan) -> str:
    """Return the plan for a notebook: its line, memory as a bar with a legend, the reason and the layouts.

    Every text is escaped: names of models are somebody else's.
    """
    headings = [name.replace("_", " ") for name in _COLUMNS]
    rows = [
        [
            f"{value:,.{0 if name == 'tokens_per_second' else 1}f}" if isinstance(value, float) else str(value)
            for name, value in row.items()
        ]
        for row in plan_rows(plan)
    ]
    rows[0][-1] = "chosen"
    line, reason = escape(plan_line(plan).strip("<>")), escape(plan.chosen.reason)
    return f"<p><b>{line}</b></p>{_memory_bar(plan)}<p>{reason}</p>{_table(headings, rows)}"


def _memory_bar(plan: Plan) -> str:
    """Return the memory of an accelerator as a bar of its capacity: what fills it, the interval above it, a legend."""
    gpu = plan.chosen.memory.gpu
    by_role = dict.fromkeys(_ROLE_COLORS, 0)
    for name, count in gpu.terms.items():
        by_role[TERM_ROLES.get(name, "other")] += count
    # Below zero where measured runs moved the allocator's share.
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


def result_html(line: str, headings: Sequence[str], rows: Iterable[Sequence[str]], *remarks: str) -> str:
    """Return a result for a notebook: a line, a table and remarks, every text escaped."""
    below = "".join(f"<p>{escape(remark)}</p>" for remark in remarks)
    return f"<p><b>{escape(line)}</b></p>{_table(headings, rows)}{below}"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose columns of text begin at the left, where notebooks put figures."""
    lines = [list(cells) for cells in rows]
    texts = [any(line[place][:1].isalpha() for line in lines) for place in range(len(headings))]

    def row(cells: Sequence[str], kind: str) -> str:
        styles = (' style="text-align:left"' if text else "" for text in texts)
        found = (f"<{kind}{style}>{escape(cell)}</{kind}>" for cell, style in zip(cells, styles, strict=True))
        return f"<tr>{''.join(found)}</tr>"

    return f"<table>{row(headings, 'th')}{''.join(row(cells, 'td') for cells in lines)}</table>"
