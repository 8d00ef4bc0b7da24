"""Charts of reports: PNG files for Markdown, SVG in HTML pages."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Draw = Callable[["Axes"], None]
"""Draws one chart."""
Points = Sequence[tuple[float, float]]
Metrics = Sequence[Mapping[str, Any]]

COLOURS = "#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#999999"
"""Paul Tol's bright scheme, distinct for any colour vision; it repeats for many series."""
RED, GREY = COLOURS[1], COLOURS[6]


def panels(*draws: Draw, height: float = 3.8) -> Figure:
    """Return a figure with charts side by side."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(4.6 * len(draws), height), layout="constrained")
    # A dollar in the name of a model must not begin a formula.
    with rc_context({"text.parse_math": False}):
        for axes, draw in zip(drawn.subplots(1, len(draws), squeeze=False)[0], draws, strict=True):
            draw(axes)
            axes.grid(alpha=0.25)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
            _, labels = axes.get_legend_handles_labels()
            if labels:
                # Above the chart it covers nothing; a chart is about 66 characters of a legend wide.
                columns = max(1, min(3, 66 // (6 + max(map(len, labels)))))
                axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=columns, fontsize=8, frameon=False)
    return drawn


def png(drawn: Figure) -> bytes:
    output = io.BytesIO()
    drawn.savefig(output, format="png", dpi=120)
    return output.getvalue()


def svg(draw: Draw, name: str, title: str) -> str:
    """Return a chart as an SVG element whose text is text, identical for identical values.

    Args:
        draw: Draws the chart.
        name: Prefix of all identifiers; unique on the page, of letters, digits and hyphens.
        title: Text for screen readers.
    """
    from matplotlib import rc_context

    output = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9}):
        panels(draw, height=3.1).savefig(output, format="svg", metadata={"Date": None, "Creator": None})
    body = re.sub(r"^.*?(?=<svg )|<metadata>.*?</metadata>|<style.*?</style>", "", output.getvalue(), flags=re.DOTALL)
    body = re.sub(r'(\bid="|xlink:href="#|url\(#)', rf"\g<1>{name}-", body)
    body = re.sub(r" font-family: [^;\"]*;", "", body)
    view = re.search(r'viewBox="[^"]*"', body)
    assert view is not None, "matplotlib writes a viewBox"
    head = f'<svg role="img" aria-label="{escape(title)}" {view[0]} xmlns:xlink="http://www.w3.org/1999/xlink">'
    return head + body[body.index(">") + 1 :].rstrip()


def names_of(labels: Sequence[str], longest: int = 28) -> list[str]:
    """Return labels that fit an axis, without the middle of long ones."""
    half = (longest - 1) // 2
    return [label if len(label) <= longest else f"{label[:half]}…{label[-half:]}" for label in labels]


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


def parts(values: Mapping[str, float], horizontal: str) -> Draw:
    """Return a horizontal bar with its value for each part, the largest on top."""

    def draw(axes: Axes) -> None:
        ordered = sorted(values.items(), key=lambda item: item[1])
        bars = axes.barh(range(len(ordered)), [value for _, value in ordered], color=COLOURS[0], height=0.7)
        axes.set_yticks(range(len(ordered)), names_of([name for name, _ in ordered]))
        axes.bar_label(bars, [f"{value:.3g}" for _, value in ordered], padding=3, fontsize=8)
        axes.margins(x=0.15)
        axes.set_xlabel(horizontal)

    return draw


def largest_parts(values: Mapping[str, float], count: int = len(COLOURS) - 1) -> dict[str, float]:
    """Return the largest parts and the sum of all others, so that each has its own colour.

    >>> largest_parts({"a": 5.0, "b": 1.0, "c": 2.0, "d": 1.0}, 2)
    {'a': 5.0, 'c': 2.0, 'other': 2.0}
    """
    ordered = sorted(values.items(), key=lambda item: -item[1])
    if len(ordered) <= count + 1:
        return dict(ordered)
    return dict(ordered[:count]) | {"other": sum(value for _, value in ordered[count:])}


def stacks(
    bars: Sequence[tuple[str, Mapping[str, float], bool]],
    vertical: str,
    *,
    limit: tuple[str, float] | None = None,
    interval: tuple[float, float] | None = None,
) -> Draw:
    """Return stacked bars.

    Args:
        bars: Name and parts of each bar, and whether it is a prediction, which is hatched.
        vertical: Label of the axis.
        limit: Label and value of a limit line.
        interval: Lower and upper end of the first bar.
    """

    def draw(axes: Axes) -> None:
        named = list(dict.fromkeys(name for _, values, _ in bars for name, value in values.items() if value))
        for index, name in enumerate(named):
            axes.bar(0, 0, width=0.7, color=COLOURS[index % len(COLOURS)], label=name)
        for position, (_, values, predicted) in enumerate(bars):
            bottom = 0.0
            for index, name in enumerate(named):
                height = max(0.0, values.get(name, 0.0))
                style: dict[str, Any] = {"color": COLOURS[index % len(COLOURS)], "edgecolor": "white", "width": 0.7}
                axes.bar(position, height, bottom=bottom, hatch="///" if predicted else "", linewidth=0.6, **style)
                bottom += height
            if position == 0 and interval is not None:
                error = [[max(0.0, bottom - interval[0])], [max(0.0, interval[1] - bottom)]]
                axes.errorbar(0, bottom, yerr=error, color="black", capsize=4, linewidth=1.2)
        if limit is not None:
            axes.axhline(limit[1], color=RED, linestyle="--", linewidth=1.2, label=limit[0])
        axes.set_xticks(range(len(bars)), names_of([name for name, _, _ in bars], 20))
        margin = max(0.5, 1.5 - len(bars) / 2)
        axes.set_xlim(-margin, len(bars) - 1 + margin)
        axes.set_ylabel(vertical)

    return draw


def distribution(values: Sequence[float], mean: float, standard_error: float | None, horizontal: str) -> Draw:
    """Return a histogram of windows, with the mean and two standard errors."""

    def draw(axes: Axes) -> None:
        axes.hist(values, bins=min(30, max(5, len(values) // 2)), color=COLOURS[0], alpha=0.75)
        axes.axvline(mean, color=RED, label="mean")
        if standard_error is not None:
            low, high = mean - 2 * standard_error, mean + 2 * standard_error
            axes.axvspan(low, high, color=RED, alpha=0.2, linewidth=0, label="± 2 standard errors")
        axes.set_xlabel(horizontal)
        axes.set_ylabel("windows")

    return draw


def points(metrics: Metrics, key: str) -> Points:
    """Return steps and logged values of a name."""
    return [(entry["step"], entry[key]) for entry in metrics if key in entry]
