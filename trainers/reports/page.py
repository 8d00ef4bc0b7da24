"""Parts of a report, and the HTML that they become: one file that asks nothing of the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ..charts.canvas import Draw, svg
from ..charts.kinds import Points

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """One figure of the summary."""

    label: str
    """What it is, with its unit where the value has none."""
    value: str
    """The figure."""
    detail: str = ""
    """Its error or interval, or what stands beside it."""
    state: str = ""
    """`good` or `bad` where it is a verdict."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows under headings; the first cell of a row names it."""

    headings: Sequence[str]
    """Of all columns."""
    rows: Sequence[Sequence[str]]
    """Cells as they are shown."""
    caption: str = ""
    """What the table shows, with units."""
    figures: bool = True
    """Whether the columns behind the first are numbers, which stand at the right."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """One drawing with what it shows."""

    title: str
    """What is drawn, with its unit."""
    draw: Draw
    """Draws it."""
    note: str = ""
    """What a reader should know: which line is a prediction, what the interval means."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """One heading with what stands below it, in this order."""

    heading: str
    """Heading."""
    texts: Sequence[str] = ()
    """Paragraphs."""
    charts: Sequence[Chart] = ()
    """Drawings, side by side where there is room."""
    tables: Sequence[Table] = ()
    """Tables."""
    folded: bool = False
    """Whether it is closed until somebody opens it; print shows it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """A report of one run, or of several beside one another."""

    kind: str
    """What was done, such as `Plan` or `Distillation`."""
    title: str
    """What it was done to."""
    subtitle: str = ""
    """Where and how, in one line."""
    tiles: Sequence[Tile] = ()
    """The summary."""
    sections: Sequence[Section] = ()
    """What follows it."""
    command: str = ""
    """Command line that made it; empty where a Python program did."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Packages that made it, by name."""
    files: Sequence[str] = ()
    """Files that the report was made from."""
    series: Mapping[str, Points] = field(default_factory=dict)
    """Curves that runs are compared by, by what they are with their unit."""
    measures: Mapping[str, float] = field(default_factory=dict)
    """Numbers that runs are compared by, likewise."""


def html(page: Page) -> str:
    """Return the page as one HTML file; every text in it is escaped, as names and paths are somebody else's."""
    from ... import __version__

    numbers = iter(range(1, 1000))

    def drawn(chart: Chart) -> str:
        return svg(chart.draw, f"chart-{next(numbers)}", chart.title)

    style = (TEMPLATES / "style.css").read_text(encoding="utf-8")
    template = _environment().get_template("page.html.j2")
    return template.render(page=page, drawn=drawn, style=style, version=__version__)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
