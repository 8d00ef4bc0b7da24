"""Report model of every command, and its HTML rendering; `markdown.py` renders the same model as Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...ds_configs.specs.units import gigabytes
from ..charts import Draw, Points, panels, png, svg

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """One figure of the summary."""

    label: str
    """Name of the figure, with its unit unless the value has one."""
    value: str
    detail: str = ""
    """Interval, prediction or baseline."""
    state: str = ""
    """`good` or `bad` for a verdict."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows under headings; the first cell of a row names it."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    """What the table shows, with units."""
    numeric: bool = True
    """Whether all columns after the first are numbers, which are aligned right."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """One drawing."""

    title: str
    """What is drawn, with its unit."""
    draw: Draw
    note: str = ""
    """How to read it, such as which line is a prediction."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """One heading with paragraphs, charts and tables, in this order."""

    heading: str
    texts: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    folded: bool = False
    """Whether a browser shows it closed at first; print shows it open."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Report of one run, or of several runs side by side."""

    kind: str
    """What was done, such as `Plan` or `Distillation`."""
    title: str
    """What it was done to."""
    subtitle: str = ""
    """Where and how, in one line."""
    facts: Sequence[Fact] = ()
    sections: Sequence[Section] = ()
    command: str = ""
    """Command line of the run; empty when a Python program started it."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the packages that ran, by name."""
    files: Sequence[str] = ()
    """Files that the report is made from."""
    series: Mapping[str, Points] = field(default_factory=dict)
    """Curves for comparisons of runs, by title with unit."""
    measures: Mapping[str, float] = field(default_factory=dict)
    """Numbers for comparisons of runs, by title with unit."""


def pictured_charts(report: Report) -> tuple[Section | None, Sequence[Chart]]:
    """Return the section and charts of the PNG file: the first two charts of the first section that has any."""
    section = next((section for section in report.sections if section.charts), None)
    return section, () if section is None else section.charts[:2]


def picture(report: Report) -> bytes:
    """Return the PNG file that the Markdown rendering shows."""
    return png(panels(*(chart.draw for chart in pictured_charts(report)[1])))


def html(report: Report) -> str:
    """Return the report as one HTML file without network access; every text is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    from ... import __version__

    numbers = iter(range(1, 1000))

    def drawn(chart: Chart) -> str:
        return svg(chart.draw, f"chart-{next(numbers)}", chart.title)

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    style = (TEMPLATES / "style.css").read_text(encoding="utf-8")
    template = environment.get_template("page.html.j2")
    return template.render(report=report, drawn=drawn, style=style, version=__version__)


def key_value_table(values: Iterable[tuple[str, object]], caption: str = "") -> Table:
    """Return a table of names and values, with lists and empty values as `plain` shows them."""
    return Table(headings=("", "value"), rows=[(n, plain(v)) for n, v in values], caption=caption, numeric=False)


def gb(count: float) -> str:
    """Return bytes in GB, or in MB below 0.1 GB.

    >>> gb(75_444_843_433), gb(2_500_000)
    ('75.4 GB', '2.50 MB')
    """
    return f"{gigabytes(count)} GB" if abs(count) >= 10**8 else f"{count / 10**6:.2f} MB"


def gb_range(low: float, high: float) -> str:
    """Return an interval of bytes.

    >>> gb_range(69_110_461_917, 84_008_886_865)
    '69.1 to 84.0 GB'
    """
    if abs(high) >= 10**8:
        return f"{gigabytes(low)} to {gigabytes(high)} GB"
    return f"{low / 10**6:.2f} to {high / 10**6:.2f} MB"


def significant(value: float, digits: int = 4) -> str:
    """Return a number with some significant digits and with thousands separators.

    >>> significant(27808.807), significant(0.0123456), significant(1204.4)
    ('27,809', '0.01235', '1,204')
    """
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def with_error(value: float, standard_error: float | None) -> str:
    """Return a number with its standard error, rounded to two significant digits.

    >>> with_error(2.31263, 0.0123), with_error(6128.4, 181.3), with_error(2.5, None)
    ('2.3126 ± 0.012', '6,128 ± 180', '2.5')
    """
    shown = significant(value, 5)
    return shown if standard_error is None else f"{shown} ± {float(f'{standard_error:.2g}'):,g}"


def perplexity(nats: float) -> str:
    """Return ``exp(cross-entropy)`` with four significant digits."""
    return f"{math.exp(min(nats, 700)):.4g}"


def mean_with_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean of values and its standard error, ``s / √n``; `None` with fewer than two."""
    mean = statistics.fmean(values)
    return mean, statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def plain(value: object) -> str:
    """Return a setting as text: lists with commas, an empty value as a dash.

    >>> plain(["q_proj", "v_proj"]), plain(None), plain(2e-05)
    ('q_proj, v_proj', '–', '2e-05')
    """
    if value is None or value == [] or value == "":
        return "–"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value)


def short_name(name: str) -> str:
    """Return a model's name without the directory of a local one.

    >>> short_name("meta-llama/Llama-3.1-8B"), short_name("/data/models/tiny/config.json"), short_name("./out/")
    ('meta-llama/Llama-3.1-8B', 'tiny', 'out')
    """
    path = name.rstrip("/").removesuffix("/config.json")
    is_path = name.startswith((".", "/", "~")) or path.count("/") > 1 or path != name
    return (path.rpartition("/")[2] or name) if is_path else name
