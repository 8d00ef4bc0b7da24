"""Charts of reports: PNG files for Markdown, SVG in HTML pages."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Draw = Callable[["Axes"], None]
"""Draws one chart."""

COLOURS = "#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#999999"
"""Paul Tol's bright scheme: distinct for any colour vision, on white and on black; they repeat for many series."""
GREY, RED = COLOURS[6], COLOURS[1]
_INK, _PAPER = "#010203", "#fdfefe"
"""Placeholders in an SVG for text and background colours, which the page sets."""
_SIZE_INCHES = 4.6, 3.1


def panels(*draws: Draw, width: float = _SIZE_INCHES[0], height: float = 3.8) -> Figure:
    """Return a figure with charts side by side."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(width * len(draws), height), layout="constrained")
    FigureCanvasAgg(drawn)
    # A dollar in the name of a model must not begin a formula.
    with rc_context({"text.parse_math": False}):
        for axes, draw in zip(drawn.subplots(1, len(draws), squeeze=False)[0], draws, strict=True):
            draw(axes)
    return drawn


def png(drawn: Figure) -> bytes:
    """Return a figure as a PNG file."""
    output = io.BytesIO()
    drawn.savefig(output, format="png", dpi=120)
    return output.getvalue()


def svg(draw: Draw, name: str, title: str, *, height: float = _SIZE_INCHES[1]) -> str:
    """Return a chart as an SVG element, identical for identical values.

    Text stays text, with colour and font of the page: the chart follows a dark scheme and can be searched.

    Args:
        draw: Draws the chart.
        name: Prefix of all identifiers; unique on the page, of letters, digits and hyphens.
        title: Text for screen readers.
        height: Height in inches, for a width of 4.6.
    """
    from html import escape

    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    inks = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "hatch.color")
    style: Any = dict.fromkeys(inks, _INK) | {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "savefig.transparent": True,
        "font.size": 9,
        "legend.frameon": False,
    }
    output = io.StringIO()
    with rc_context(style):
        drawn = panels(draw, height=height)
        FigureCanvasSVG(drawn)
        drawn.savefig(output, format="svg", metadata={"Date": None, "Creator": None})
    body = re.sub(r"^.*?(?=<svg )|<metadata>.*?</metadata>|<style.*?</style>", "", output.getvalue(), flags=re.DOTALL)
    body = re.sub(r'(\bid="|xlink:href="#|url\(#)', rf"\g<1>{name}-", body)
    body = body.replace(_INK, "currentColor").replace(_PAPER, "var(--ground)")
    body = re.sub(r" font-family: [^;\"]*;", "", body)
    view = re.search(r'viewBox="[^"]*"', body)
    assert view is not None, "matplotlib writes a viewBox"
    head = f'<svg role="img" aria-label="{escape(title)}" {view[0]} xmlns:xlink="http://www.w3.org/1999/xlink">'
    return head + body[body.index(">") + 1 :].rstrip()


def finish(axes: Axes, horizontal: str, vertical: str, *, columns: int = 2) -> None:
    """Label the axes with their units, and put the legend above the chart, where it covers nothing."""
    axes.set_xlabel(horizontal)
    axes.set_ylabel(vertical)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        # A chart is about 66 characters of a legend wide.
        columns = max(1, min(columns, 66 // (6 + max(map(len, labels)))))
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=columns, fontsize=8, frameon=False)


def names_of(labels: Sequence[str], longest: int = 28) -> list[str]:
    """Return labels that fit an axis, without the middle of long ones."""
    half = (longest - 1) // 2
    return [label if len(label) <= longest else f"{label[:half]}…{label[-half:]}" for label in labels]


Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """A predicted value with its interval, drawn behind the measured values."""

    value: float
    low: float | None = None
    high: float | None = None
    label: str = "predicted"


def curves(
    series: Mapping[str, Points],
    vertical: str,
    *,
    horizontal: str = "optimizer step",
    expected: Expected | None = None,
) -> Draw:
    """Return a line for each series that has points; with an expected value, the axis begins at zero."""

    def draw(axes: Axes) -> None:
        from matplotlib.ticker import MaxNLocator

        drawn = {label: points for label, points in series.items() if points}
        if expected is not None:
            label = expected.label
            if expected.low is not None and expected.high is not None:
                axes.axhspan(expected.low, expected.high, color=GREY, alpha=0.25, linewidth=0)
                label += ", with interval"
            axes.axhline(expected.value, color=GREY, linestyle="--", linewidth=1.4, label=label)
        for index, (label, points) in enumerate(drawn.items()):
            style: dict[str, Any] = {"marker": "." if len(points) < 30 else "", "linewidth": 1.6}
            axes.plot(*zip(*points, strict=True), label=label, color=COLOURS[index % len(COLOURS)], **style)
        finish(axes, horizontal, vertical)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if expected is not None:
            axes.set_ylim(bottom=0)

    return draw


def parts(values: Mapping[str, float], horizontal: str) -> Draw:
    """Return a horizontal bar with its value for each part, the largest on top."""

    def draw(axes: Axes) -> None:
        ordered = sorted(values.items(), key=lambda item: item[1])
        names, lengths = [name for name, _ in ordered], [value for _, value in ordered]
        bars = axes.barh(range(len(names)), lengths, color=COLOURS[0], height=0.7)
        axes.set_yticks(range(len(names)), names_of(names))
        axes.bar_label(bars, [f"{value:.3g}" for value in lengths], padding=3, fontsize=8)
        axes.margins(x=0.15)
        finish(axes, horizontal, "")
        axes.grid(visible=False, axis="y")

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
    ranges: Mapping[int, tuple[float, float]] | None = None,
) -> Draw:
    """Return stacked bars.

    Args:
        bars: Name and parts of each bar, and whether it is a prediction, which is hatched.
        vertical: Label of the axis.
        limit: Label and value of a limit line.
        ranges: Lower and upper end of a bar's interval, by index.
    """

    def draw(axes: Axes) -> None:
        named = list(dict.fromkeys(name for _, values, _ in bars for name, value in values.items() if value))
        for position, (_, values, predicted) in enumerate(bars):
            bottom = 0.0
            for index, name in enumerate(named):
                height = max(0.0, values.get(name, 0.0))
                style: dict[str, Any] = {
                    "color": COLOURS[index % len(COLOURS)],
                    "edgecolor": _PAPER,
                    "linewidth": 0.6,
                    "width": 0.7,
                }
                axes.bar(position, height, bottom=bottom, hatch="///" if predicted else "", **style)
                bottom += height
            low, high = (ranges or {}).get(position, (bottom, bottom))
            if low < high:
                error = [[max(0.0, bottom - low)], [max(0.0, high - bottom)]]
                axes.errorbar(position, bottom, yerr=error, color=_INK, capsize=4, linewidth=1.2)
        for index, name in enumerate(named):
            axes.bar(0, 0, width=0.7, color=COLOURS[index % len(COLOURS)], label=name)
        if limit is not None:
            axes.axhline(limit[1], color=RED, linestyle="--", linewidth=1.2, label=limit[0])
        axes.set_xticks(range(len(bars)), names_of([name for name, _, _ in bars], 20))
        axes.set_xlim(-max(0.5, 1.5 - len(bars) / 2), len(bars) - 1 + max(0.5, 1.5 - len(bars) / 2))
        finish(axes, "", vertical, columns=3)
        axes.grid(visible=False, axis="x")

    return draw


def distribution(
    values: Sequence[float], mean: float, standard_error: float | None, horizontal: str, *, zero: str = ""
) -> Draw:
    """Return a histogram of windows, with the mean and two standard errors; `zero` labels a line at 0."""

    def draw(axes: Axes) -> None:
        axes.hist(values, bins=min(30, max(5, len(values) // 2)), color=COLOURS[0], alpha=0.75)
        axes.axvline(mean, color=RED, label="mean")
        if standard_error is not None:
            low, high = mean - 2 * standard_error, mean + 2 * standard_error
            axes.axvspan(low, high, color=RED, alpha=0.2, linewidth=0, label="± 2 standard errors")
        if zero:
            axes.axvline(0, color=GREY, linewidth=1.2, label=zero)
        finish(axes, horizontal, "windows", columns=3)

    return draw


LOSSES = {
    "loss": "loss",
    "student_cross_entropy": "cross-entropy of the labels",
    "teacher_cross_entropy": "teacher's cross-entropy",
    "kl_per_token": "KL(teacher | trained model)",
}
"""Labels of losses and measures in nats per token, by name in the log."""

Metrics = Sequence[Mapping[str, Any]]


def points(metrics: Metrics, key: str) -> Points:
    """Return steps and logged values of a name."""
    return [(entry["step"], entry[key]) for entry in metrics if key in entry]
