"""Charts of reports, as SVG in HTML pages."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Draw = Callable[["Axes"], None]
"""Draws one chart."""
Points = Sequence[tuple[float, float]]
Metrics = Sequence[Mapping[str, Any]]

COLOURS = "#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#999999"
"""Paul Tol's bright scheme, distinct for any colour vision; it repeats for many series."""
GREY = COLOURS[6]


def svg(*draws: Draw, title: str) -> str:
    """Return charts one below the other as an SVG element whose text is text, identical for identical values.

    `title` is for screen readers.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure, output = Figure(figsize=(4.6, 3.8 * len(draws)), layout="constrained"), io.StringIO()
    # A dollar in the name of a model must not begin a formula.
    with rc_context({"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "report", "font.size": 9}):
        for axes, draw in zip(figure.subplots(len(draws), squeeze=False).flat, draws, strict=True):
            draw(axes)
            axes.grid(alpha=0.25)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
            _, labels = axes.get_legend_handles_labels()
            if labels:
                # Above the chart it covers nothing; a chart is about 66 characters of a legend wide.
                in_a_row = max(1, min(3, 66 // (6 + max(map(len, labels)))))
                axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=in_a_row, fontsize=8, frameon=False)
        omitted = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(output, format="svg", metadata=omitted)
    drawn = output.getvalue()
    return drawn[drawn.index("<svg ") :].replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1).rstrip()


def curves(series: Mapping[str, Points], vertical: str, *, expected: Sequence[float] = ()) -> Draw:
    """Return a line by optimizer step for each series; `expected` is a predicted value and its interval."""

    def draw(axes: Axes) -> None:
        from matplotlib.ticker import MaxNLocator

        if expected:
            value, low, high = expected
            axes.axhspan(low, high, color=GREY, alpha=0.25, linewidth=0)
            axes.axhline(value, color=GREY, linestyle="--", linewidth=1.4, label="predicted, with interval")
        for index, (label, values) in enumerate(series.items()):
            style: dict[str, Any] = {"marker": "." if len(values) < 30 else "", "linewidth": 1.6}
            axes.plot(*zip(*values, strict=True), label=label, color=COLOURS[index % len(COLOURS)], **style)
        axes.set_xlabel("optimizer step")
        axes.set_ylabel(vertical)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if expected:
            axes.set_ylim(bottom=0)

    return draw


def points(metrics: Metrics, key: str) -> Points:
    return [(entry["step"], entry[key]) for entry in metrics if key in entry]
