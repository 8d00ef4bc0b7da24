"""Figures of matplotlib, and what they become: a PNG beside a report in Markdown, or SVG inside a page of HTML."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Draw = Callable[["Axes"], None]
"""Draws one chart."""

BLUE, RED, GREEN, YELLOW, CYAN, PURPLE, GREY = (
    "#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#999999",
)  # fmt: skip
"""Colours that people with any colour vision tell apart, on white and on black (Paul Tol's bright scheme)."""
COLOURS = BLUE, RED, GREEN, YELLOW, CYAN, PURPLE, GREY
_INK, _PAPER = "#010203", "#fdfefe"
"""Stand for the colours of text and ground in an SVG, which the page decides."""
_SIZE_INCHES = 4.6, 3.1
_SVG_DPI = 72
"""Points of an SVG in an inch."""


def panels(*draws: Draw, width: float = _SIZE_INCHES[0], height: float = 3.8) -> Figure:
    """Return a figure with charts side by side."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(width * len(draws), height), layout="constrained")
    FigureCanvasAgg(drawn)
    # Names are somebody else's: a dollar in one begins no formula.
    with rc_context({"text.parse_math": False}):
        for axes, draw in zip(drawn.subplots(1, len(draws), squeeze=False)[0], draws, strict=True):
            draw(axes)
    return drawn


def png(drawn: Figure) -> bytes:
    """Return a figure as a PNG file."""
    output = io.BytesIO()
    _lay_out(drawn, dpi=120)
    drawn.savefig(output, format="png", dpi=120)
    return output.getvalue()


def _lay_out(drawn: Figure, *, dpi: int) -> None:
    """Place the charts of a figure as `savefig` would, which draws everything once for that and throws it away."""
    drawn.set_dpi(dpi)
    engine = drawn.get_layout_engine()
    assert engine is not None, "panels() asks for one"
    engine.execute(drawn)
    drawn.set_layout_engine(None)


def svg(draw: Draw, name: str, title: str, *, height: float = _SIZE_INCHES[1]) -> str:
    """Return a chart as an SVG element for a page, the same for the same values.

    Text stays text, and takes colour and font from the page: the chart follows a dark scheme and can be searched.

    Args:
        draw: Draws the chart.
        name: Begins every identifier in it; unique on the page, of letters, digits and hyphens.
        title: What a screen reader says.
        height: In inches, for a width of 4.6.
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
        _lay_out(drawn, dpi=_SVG_DPI)
        drawn.savefig(output, format="svg", metadata={"Date": None, "Creator": None})
    body = re.sub(r"^.*?(?=<svg )|<metadata>.*?</metadata>|<style.*?</style>", "", output.getvalue(), flags=re.DOTALL)
    body = re.sub(r'(\bid="|xlink:href="#|url\(#)', rf"\g<1>{name}-", body)
    body = body.replace(_INK, "currentColor").replace(_PAPER, "var(--ground)")
    body = re.sub(r" font-family: [^;\"]*;", "", body)
    view = re.search(r'viewBox="[^"]*"', body)
    assert view is not None, "matplotlib states the size of what it draws"
    head = f'<svg role="img" aria-label="{escape(title)}" {view[0]} xmlns:xlink="http://www.w3.org/1999/xlink">'
    return head + body[body.index(">") + 1 :].rstrip()


def finish(axes: Axes, horizontal: str, vertical: str, *, columns: int = 2) -> None:
    """Name the axes with their units, and explain what is drawn above the chart, where it covers nothing."""
    axes.set_xlabel(horizontal)
    axes.set_ylabel(vertical)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        # About 66 characters of a legend stand beside one another on a chart.
        columns = max(1, min(columns, 66 // (6 + max(map(len, labels)))))
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=columns, fontsize=8, frameon=False)


def paper() -> str:
    """Return the colour of the ground, for gaps between areas."""
    return _PAPER


def ink() -> str:
    """Return the colour of text, for lines that mean something."""
    return _INK


def colour(place: int) -> str:
    """Return the colour of a series by its place; colours begin again where there are more series."""
    return COLOURS[place % len(COLOURS)]


def names_of(labels: Sequence[str], longest: int = 28) -> list[str]:
    """Return labels that fit beside an axis: the middle of a long one is left out."""
    half = (longest - 1) // 2
    return [label if len(label) <= longest else f"{label[:half]}…{label[-half:]}" for label in labels]
