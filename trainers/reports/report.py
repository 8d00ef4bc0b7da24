"""The report model of every command, the formats of its figures, and its renderings: Markdown and HTML."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from ...ds_configs.specs.terms import Place, Term
from ...ds_configs.specs.units import gigabytes

Points = Sequence[tuple[float, float]]
Metrics = Sequence[Mapping[str, Any]]


def points(metrics: Metrics, key: str) -> Points:
    return [(entry["step"], entry[key]) for entry in metrics if key in entry]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under headings; the first cell of a row names it."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """One heading with paragraphs and tables, in this order."""

    heading: str
    texts: Sequence[str] = ()
    tables: Sequence[Table] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    kind: str
    title: str
    subtitle: str = ""
    summary: Sequence[Table] = ()
    sections: Sequence[Section] = ()
    command: str = ""
    """Command line of the run; empty when a Python program started it."""
    versions: Mapping[str, str] = field(default_factory=dict)
    files: Sequence[str] = ()
    """Files that the report is made from."""


def figures(rows: Sequence[Sequence[str]]) -> Table:
    """Return a table of figures: name with unit, value, and its interval, prediction or baseline."""
    return Table(("figure", "value", "detail"), rows)


def key_value_table(values: Iterable[tuple[str, object]], caption: str = "") -> Table:
    """Return a table of names and values, with lists and empty values as `plain` shows them."""
    return Table(("", "value"), [(name, plain(value)) for name, value in values], caption)


def gb(count: float) -> str:
    """Return bytes in GB, or in MB below 0.1 GB.

    >>> gb(75_444_843_433), gb(2_500_000)
    ('75.4 GB', '2.50 MB')
    """
    return f"{gigabytes(count)} GB" if abs(count) >= 10**8 else f"{count / 10**6:.2f} MB"


def rows_of_terms(terms: Iterable[Term], place: Place) -> list[tuple[str, str, str]]:
    """Return title, value and meaning of the terms that belong to a place."""
    return [
        (term.title, f"{term.seconds:.4f} s" if term.bytes is None else gb(term.bytes), term.meaning)
        for term in terms
        if term.lives_on == place
    ]


def significant(value: float, digits: int = 4) -> str:
    """Return a number with some significant digits and with thousands separators.

    >>> significant(27808.807), significant(0.0123456), significant(1204.4)
    ('27,809', '0.01235', '1,204')
    """
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def interval(low: float, high: float, shape: Callable[[float], str] = significant) -> str:
    """Return the ends of an interval, each formatted by `shape`.

    >>> interval(69_110_461_917, 84_008_886_865, gb), interval(0.5, 1.25)
    ('69.1 GB to 84.0 GB', '0.5 to 1.25')
    """
    return f"{shape(low)} to {shape(high)}"


def with_error(value: float, standard_error: float | None, shape: Callable[[float], str] | None = None) -> str:
    """Return a number, by default with five significant digits, with its standard error, rounded to two.

    >>> with_error(2.31263, 0.0123), with_error(6128.4, 181.3), with_error(2.5, None)
    ('2.3126 ± 0.012', '6,128 ± 180', '2.5')
    """
    shown = significant(value, 5) if shape is None else shape(value)
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


_LINE_ENDS = re.compile(r"[\r\n]+")
_PIPES = re.compile(r"(\\*)\|")
"""A backslash before a pipe would escape the backslash that escapes the pipe."""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title} – Shardwright</title><style>{style}</style></head>
<body><main>
{body}</main><footer><p>Shardwright {version}{sources}. This file loads nothing from the network.</p></footer>
</body></html>
"""


def html(report: Report) -> str:
    """Return the same Markdown as one HTML file without network access; every text is escaped."""
    from markdown_it import MarkdownIt

    from ... import __version__

    # Without links, pictures and emphasis: a name with an asterisk is shown as it is.
    parser = MarkdownIt("zero").enable(["table", "heading", "backticks", "escape"])
    body = parser.render(markdown(report))
    body = body.replace("<table>", '<div class="table" tabindex="0"><table>').replace("</table>", "</table></div>")
    return _PAGE.format(
        title=escape(f"{report.title}: {report.kind.lower()}"),
        style=(Path(__file__).parent / "templates" / "report.css").read_text(encoding="utf-8"),
        body=body,
        version=__version__,
        sources=escape(f", from {', '.join(report.files)}" if report.files else ""),
    )


def markdown(report: Report) -> str:
    blocks = [f"# {report.kind} report", ": ".join(filter(None, (code(report.title), _text(report.subtitle))))]
    blocks += _tables(report.summary)
    for section in report.sections:
        blocks += [f"## {section.heading}", *map(_text, section.texts)]
        blocks += _tables(section.tables)
    blocks += ["## How this was made", code(report.command) if report.command else "By a Python program."]
    blocks.append(_text(", ".join(f"{name} {version}" for name, version in report.versions.items())))
    return "\n\n".join(filter(None, blocks)) + "\n"


def _tables(tables: Sequence[Table]) -> list[str]:
    return [block for shown in tables for block in (_text(shown.caption), table(shown.headings, shown.rows))]


def _text(text: str) -> str:
    return re.sub(r"^[#|`]|<", r"\\\g<0>", _LINE_ENDS.sub(" ", text))


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table.

    >>> print(table(("a", "b"), [(1, "x|y")]))
    | a | b |
    |---|---|
    | 1 | x\\|y |
    """

    def line(cells: Sequence[object]) -> str:
        return "| " + " | ".join(_LINE_ENDS.sub(" ", _PIPES.sub(r"\1\1\|", str(cell))) for cell in cells) + " |"

    return "\n".join([line(head), "|" + "---|" * len(head), *map(line, rows)])


def code(value: object) -> str:
    """Return a value as inline code, fenced by more backticks than it contains.

    >>> code("model"), code("a`b")
    ('`model`', '`` a`b ``')
    """
    text = _LINE_ENDS.sub(" ", str(value))
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence, space = "`" * (longest + 1), " " if longest else ""
    return f"{fence}{space}{text}{space}{fence}"
