"""Page of several runs beside one another."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from ..charts.kinds import columns, curves
from .page import Chart, Page, Section, Table, Tile
from .words import significant


def comparison_page(pages: Mapping[str, Page]) -> Page:
    """Return the report of several runs by the names of their directories: figures in columns, curves overlaid."""
    names = numbered(list(pages))
    runs = dict(zip(names, pages.values(), strict=True))
    return Page(
        kind="Comparison",
        title=" · ".join(names),
        subtitle=", ".join(dict.fromkeys(page.kind for page in pages.values())),
        tiles=tuple(
            Tile(label=name, value=page.tiles[0].value, detail=f"{page.tiles[0].label}; {page.title}")
            for name, page in runs.items()
        ),
        sections=tuple(section for section in (_figures(runs), _curves(runs), _bars(runs), _made(runs)) if section),
        versions=_common_versions(list(pages.values())),
        files=tuple(f"{directory}/{name}" for directory, page in pages.items() for name in page.files),
    )


def numbered(paths: Sequence[str]) -> list[str]:
    """Return a short name for each directory, told apart by its place where two end alike.

    >>> numbered(["runs/a", "old/a", "runs/b"])
    ['a (1)', 'a (2)', 'b']
    """
    last = [path.rstrip("/").rpartition("/")[2] or path for path in paths]
    seen: dict[str, int] = {}
    names = []
    for name in last:
        seen[name] = seen.get(name, 0) + 1
        # matplotlib leaves labels that begin with an underscore out of legends.
        names.append((f"{name} ({seen[name]})" if last.count(name) > 1 else name).lstrip("_") or name)
    return names


def _figures(runs: Mapping[str, Page]) -> Section:
    labels = dict.fromkeys(tile.label for page in runs.values() for tile in page.tiles)
    shown = [{tile.label: _with_detail(tile) for tile in page.tiles} for page in runs.values()]
    rows = [("what", *(page.kind for page in runs.values())), ("of", *(page.title for page in runs.values()))]
    rows += [("where", *(page.subtitle for page in runs.values()))]
    rows += [(label, *(tiles.get(label, "–") for tiles in shown)) for label in labels]
    return Section(heading="Side by side", tables=(Table(headings=("", *runs), rows=rows, figures=False),))


def _with_detail(tile: Tile) -> str:
    return f"{tile.value} ({tile.detail})" if tile.detail else tile.value


def _curves(runs: Mapping[str, Page]) -> Section | None:
    charts = []
    for title in dict.fromkeys(title for page in runs.values() for title in page.series):
        series = {name: page.series[title] for name, page in runs.items() if page.series.get(title)}
        if series:
            charts.append(Chart(title=title.capitalize(), draw=curves(series, title)))
    return Section(heading="By step", charts=charts) if charts else None


def _bars(runs: Mapping[str, Page]) -> Section | None:
    charts, rows = [], []
    for title in dict.fromkeys(title for page in runs.values() for title in page.measures):
        found = {name: page.measures[title] for name, page in runs.items() if title in page.measures}
        rows.append((title, *(significant(found[name]) if name in found else "–" for name in runs)))
        if len(found) > 1:
            charts.append(Chart(title=title.capitalize(), draw=columns(found, title)))
    if not rows:
        return None
    return Section(heading="Measures", charts=charts, tables=(Table(headings=("", *runs), rows=rows),))


def _made(runs: Mapping[str, Page]) -> Section:
    rows = [(name, page.command or "a Python program") for name, page in runs.items()]
    different = sorted({name for page in runs.values() for name in page.versions if not _is_common(name, runs)})
    versions = [(name, *(page.versions.get(name, "–") for page in runs.values())) for name in different]
    tables = [Table(headings=("run", "command"), rows=rows, figures=False)]
    if versions:
        caption = "Packages whose versions differ."
        tables.append(Table(headings=("", *runs), rows=versions, caption=caption, figures=False))
    return Section(heading="How the runs were made", tables=tables)


def _is_common(package: str, runs: Mapping[str, Page]) -> bool:
    return len({page.versions.get(package) for page in runs.values()}) == 1


def _common_versions(pages: Sequence[Page]) -> dict[str, str]:
    first, *others = (dict(page.versions) for page in pages)
    return {name: number for name, number in first.items() if all(other.get(name) == number for other in others)}


def comparison_command(directories: Sequence[str]) -> str:
    """Return the command line that compares these directories."""
    return shlex.join(["shardwright", "report", *directories])
