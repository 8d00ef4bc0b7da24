"""Report model of every command, and the formats of its figures; `markdown.py` renders it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ...ds_configs.specs.units import gigabytes
from .charts import Draw


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under headings; the first cell of a row names it."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Chart:
    """One drawing; its title has the unit, its note says how to read it."""

    title: str
    draw: Draw
    note: str = ""


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
    """Tables above the charts."""
    charts: Sequence[Chart] = ()
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
