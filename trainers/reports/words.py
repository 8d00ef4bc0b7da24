"""Numbers as reports show them: with a unit, and with their error or interval where there is one."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from ...ds_configs.specs.units import gigabytes


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
    """Return a number with some significant digits, and its thousands apart.

    >>> significant(27808.807), significant(0.0123456), significant(1204.4)
    ('27,809', '0.01235', '1,204')
    """
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def with_error(value: float, standard_error: float | None) -> str:
    """Return a number with its standard error, which has two significant digits.

    >>> with_error(2.31263, 0.0123), with_error(6128.4, 181.3), with_error(2.5, None)
    ('2.3126 ± 0.012', '6,128 ± 180', '2.5')
    """
    shown = significant(value, 5)
    return shown if standard_error is None else f"{shown} ± {float(f'{standard_error:.2g}'):,g}"


def unit_of(sizes: Iterable[float]) -> tuple[str, float]:
    """Return the unit that sizes in bytes are drawn in, and its bytes.

    >>> unit_of([75e9, 3e6]), unit_of([3e6])
    (('GB', 1000000000.0), ('MB', 1000000.0))
    """
    return ("GB", 1e9) if max(sizes, default=0) >= 10**8 else ("MB", 1e6)


def mean_with_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean of values and its standard error, ``s / √n``; `None` with fewer than two."""
    mean = statistics.fmean(values)
    return mean, statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def plain(value: object) -> str:
    """Return a setting as text: lists by commas, nothing as a dash.

    >>> plain(["q_proj", "v_proj"]), plain(None), plain(2e-05)
    ('q_proj, v_proj', '–', '2e-05')
    """
    if value is None or value == [] or value == "":
        return "–"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value)


def short_name(name: str) -> str:
    """Return a model's name without the place of a local one; a table of the report has it in full.

    >>> short_name("meta-llama/Llama-3.1-8B"), short_name("/data/models/tiny/config.json"), short_name("./out/")
    ('meta-llama/Llama-3.1-8B', 'tiny', 'out')
    """
    whole = name.rstrip("/").removesuffix("/config.json")
    is_path = name.startswith((".", "/", "~")) or whole.count("/") > 1 or whole != name
    return (whole.rpartition("/")[2] or name) if is_path else name
