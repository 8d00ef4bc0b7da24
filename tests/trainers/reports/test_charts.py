"""Charts: legends that cover nothing, hostile names, and SVG that is the same for the same values."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from shardwright.trainers.reports import charts
from shardwright.trainers.reports.charts import Draw, panels, png, svg

LOSSES = [(step, 3.0 / step) for step in range(1, 12)]
HOSTILE = '<script>alert("$x$")</script>'
DRAWN: dict[str, Draw] = {
    "curves": charts.curves({"loss": LOSSES, "KL": LOSSES}, "nats", expected=(1, 0.5, 2)),
    "distribution": charts.distribution([0.1, 0.2, 0.15, 0.3], 0.19, 0.02, "nats"),
}


@pytest.mark.parametrize("name", DRAWN)
def test_legends_do_not_cover_the_chart(name: str) -> None:
    drawn = panels(DRAWN[name])
    drawn.canvas.draw()
    (axes,) = drawn.axes
    legend = axes.get_legend()
    field, box = axes.get_window_extent(), legend.get_window_extent()
    assert box.y0 >= field.y1 - 1
    # In an axis of its own size nothing is cut off either.
    assert drawn.bbox.x0 <= box.x0 and box.x1 <= drawn.bbox.x1 and box.y1 <= drawn.bbox.y1


@pytest.mark.parametrize("name", DRAWN)
def test_svg_is_deterministic_and_refers_to_itself_only(name: str) -> None:
    first = svg(DRAWN[name], DRAWN[name], title="Title")
    assert first == svg(DRAWN[name], DRAWN[name], title="Title")
    root = ElementTree.fromstring(first.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1))  # noqa: S314
    assert root.get("aria-label") == "Title" and "width" not in root.attrib
    identifiers = re.findall(r'\bid="([^"]*)"', first)
    assert len(set(identifiers)) == len(identifiers)
    used = re.findall(r'url\(#([^)]*)\)|xlink:href="#([^"]*)"', first)
    assert {one or other for one, other in used} <= set(identifiers)
    assert [element for element in root.iter() if element.tag.endswith("text")]
    assert "http" not in first.replace("http://www.w3.org/1999/xlink", "")


def test_hostile_labels_stay_text() -> None:
    drawn = svg(charts.curves({HOSTILE: LOSSES}, HOSTILE), title=HOSTILE)
    root = ElementTree.fromstring(drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1))  # noqa: S314
    assert root.get("aria-label") == HOSTILE
    assert [element.text for element in root.iter() if element.text and "script" in element.text] == [HOSTILE] * 2
    assert png(charts.curves({r"$\frac{": LOSSES, "$$": LOSSES}, "$_")).startswith(b"\x89PNG")
