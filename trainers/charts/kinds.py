"""Kinds of charts: each returns what draws it onto axes, for a page or a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .canvas import BLUE, COLOURS, GREY, RED, Draw, colour, finish, ink, names_of, paper

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """A predicted value with its interval, drawn behind what was measured."""

    value: float
    """The prediction."""
    low: float | None = None
    """Lower end of its interval."""
    high: float | None = None
    """Upper end."""
    label: str = "predicted"
    """What the legend calls it."""


def curves(
    series: Mapping[str, Points],
    vertical: str,
    *,
    horizontal: str = "optimizer step",
    expected: Expected | None = None,
    colours: Sequence[str] = (),
) -> Draw:
    """Return lines over steps, one for each named series that has points; from zero on where one is expected."""

    def draw(axes: Axes) -> None:
        from matplotlib.ticker import MaxNLocator

        drawn = {label: points for label, points in series.items() if points}
        if expected is not None:
            _draw_expected(axes, expected)
        for place, (label, points) in enumerate(drawn.items()):
            style: dict[str, Any] = {"marker": "." if len(points) < 30 else "", "linewidth": 1.6}
            stroke = colours[place] if place < len(colours) else colour(place)
            axes.plot(*zip(*points, strict=True), label=label, color=stroke, **style)
        finish(axes, horizontal, vertical)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if expected is not None:
            axes.set_ylim(bottom=0)

    return draw


def _draw_expected(axes: Axes, expected: Expected) -> None:
    label = expected.label
    if expected.low is not None and expected.high is not None:
        axes.axhspan(expected.low, expected.high, color=GREY, alpha=0.25, linewidth=0)
        label += ", with its interval"
    axes.axhline(expected.value, color=GREY, linestyle="--", linewidth=1.4, label=label)


def parts(values: Mapping[str, float], horizontal: str) -> Draw:
    """Return one horizontal bar for each named part, the largest on top, with its value."""

    def draw(axes: Axes) -> None:
        ordered = sorted(values.items(), key=lambda item: item[1])
        names, lengths = [name for name, _ in ordered], [value for _, value in ordered]
        bars = axes.barh(range(len(names)), lengths, color=BLUE, height=0.7)
        axes.set_yticks(range(len(names)), names_of(names))
        axes.bar_label(bars, [f"{value:.3g}" for value in lengths], padding=3, fontsize=8)
        axes.margins(x=0.15)
        finish(axes, horizontal, "")
        axes.grid(visible=False, axis="y")

    return draw


def columns(values: Mapping[str, float], vertical: str, *, colours: Sequence[str] = (), digits: int = 4) -> Draw:
    """Return one upright bar for each name, with its value above it."""

    def draw(axes: Axes) -> None:
        strokes = list(colours) or [colour(place) for place in range(len(values))]
        bars = axes.bar(range(len(values)), list(values.values()), color=strokes, width=0.6)
        axes.bar_label(bars, [f"{value:.{digits}g}" for value in values.values()], padding=2, fontsize=8)
        axes.set_xticks(range(len(values)), names_of(list(values), 18))
        axes.margins(y=0.12)
        finish(axes, "", vertical)
        axes.grid(visible=False, axis="x")

    return draw


def largest_parts(values: Mapping[str, float], count: int = len(COLOURS) - 1) -> dict[str, float]:
    """Return the largest parts by name and the sum of all others, so that each has a colour of its own.

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
        bars: Each with its name, its parts, and whether it is a prediction, which is hatched.
        vertical: Name of the axis.
        limit: Name and height of a line that nothing may pass.
        ranges: Lower and upper end of a bar's interval, by its place.
    """

    def draw(axes: Axes) -> None:
        named = list(dict.fromkeys(name for _, values, _ in bars for name, value in values.items() if value))
        for place, (_, values, predicted) in enumerate(bars):
            bottom = 0.0
            for index, name in enumerate(named):
                height = max(0.0, values.get(name, 0.0))
                style: dict[str, Any] = {"color": colour(index), "edgecolor": paper(), "linewidth": 0.6, "width": 0.7}
                axes.bar(place, height, bottom=bottom, hatch="///" if predicted else "", **style)
                bottom += height
            low, high = (ranges or {}).get(place, (bottom, bottom))
            if low < high:
                error = [[max(0.0, bottom - low)], [max(0.0, high - bottom)]]
                axes.errorbar(place, bottom, yerr=error, color=ink(), capsize=4, linewidth=1.2)
        for index, name in enumerate(named):
            axes.bar(0, 0, width=0.7, color=colour(index), label=name)
        if limit is not None:
            axes.axhline(limit[1], color=RED, linestyle="--", linewidth=1.2, label=limit[0])
        axes.set_xticks(range(len(bars)), names_of([name for name, _, _ in bars], 20))
        axes.set_xlim(-max(0.5, 1.5 - len(bars) / 2), len(bars) - 1 + max(0.5, 1.5 - len(bars) / 2))
        finish(axes, "", vertical, columns=3)
        axes.grid(visible=False, axis="x")

    return draw


def scatter(
    groups: Mapping[str, Points], horizontal: str, vertical: str, *, limit: tuple[str, float] | None = None
) -> Draw:
    """Return points, a colour for each group; `limit` is the name and place of an upright line not to be passed."""

    def draw(axes: Axes) -> None:
        for place, (label, points) in enumerate(groups.items()):
            if points:
                marker = "*" if place == 0 else "o"
                style: dict[str, Any] = {"s": 110 if place == 0 else 22, "zorder": 3 - min(place, 2)}
                axes.scatter(*zip(*points, strict=True), label=label, color=colour(place), marker=marker, **style)
        if limit is not None:
            axes.axvline(limit[1], color=RED, linestyle="--", linewidth=1.2, label=limit[0])
        axes.set_ylim(bottom=0)
        finish(axes, horizontal, vertical)

    return draw


def distribution(
    values: Sequence[float], mean: float, standard_error: float | None, horizontal: str, *, zero: str = ""
) -> Draw:
    """Return how many windows have which value, with the mean and two standard errors; `zero` names a line at 0."""

    def draw(axes: Axes) -> None:
        axes.hist(values, bins=min(30, max(5, len(values) // 2)), color=BLUE, alpha=0.75)
        axes.axvline(mean, color=RED, label="mean")
        if standard_error is not None:
            low, high = mean - 2 * standard_error, mean + 2 * standard_error
            axes.axvspan(low, high, color=RED, alpha=0.2, linewidth=0, label="± 2 standard errors")
        if zero:
            axes.axvline(0, color=GREY, linewidth=1.2, label=zero)
        finish(axes, horizontal, "windows", columns=3)

    return draw


def tail(value_at_share: Mapping[str, float], mean: float, horizontal: str) -> Draw:
    """Return the share of tokens with more than a value, on logarithmic axes: a small mean may hide few far ones."""

    def draw(axes: Axes) -> None:
        points = [(value, 1 - float(share)) for share, value in value_at_share.items()]
        points = [(value, share) for value, share in points if value > 0 and share > 0]
        if points:
            axes.loglog(*zip(*points, strict=True), color=BLUE, label="tokens")
        if mean > 0:
            axes.axvline(mean, color=RED, linestyle="--", label="mean")
        finish(axes, horizontal, "share of tokens with more")

    return draw
