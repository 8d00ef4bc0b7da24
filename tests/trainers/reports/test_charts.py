"""Charts: legends that cover nothing, hostile names, and SVG that is the same for the same values."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from shardwright.trainers.reports.charts import curves, panels, png, svg

LOSSES = [(step, 3.0 / step) for step in range(1, 12)]
HOSTILE = '<script>alert("$x$")</script>'
DRAWN = curves({"loss": LOSSES, "KL": LOSSES}, "nats", expected=(1, 0.5, 2))


def test_legends_do_not_cover_the_chart() -> None:
    drawn = panels(DRAWN)
    drawn.canvas.draw()
    (axes,) = drawn.axes
    legend = axes.get_legend()
    field, box = axes.get_window_extent(), legend.get_window_extent()
    assert box.y0 >= field.y1 - 1
    # In an axis of its own size nothing is cut off either.
    assert drawn.bbox.x0 <= box.x0 and box.x1 <= drawn.bbox.x1 and box.y1 <= drawn.bbox.y1


def test_svg_is_deterministic_and_refers_to_itself_only() -> None:
    first = svg(DRAWN, DRAWN, title="Title")
    assert first == svg(DRAWN, DRAWN, title="Title")
    root = ElementTree.fromstring(first)  # noqa: S314
    assert root.get("aria-label") == "Title"
    identifiers = re.findall(r'\bid="([^"]*)"', first)
    assert len(set(identifiers)) == len(identifiers)
    used = re.findall(r'url\(#([^)]*)\)|xlink:href="#([^"]*)"', first)
    assert {clip or path for clip, path in used} <= set(identifiers)
    assert [element for element in root.iter() if element.tag.endswith("text")]
    assert "http" not in re.sub(r'xmlns(:xlink)?="[^"]*"', "", first)


def test_hostile_labels_stay_text() -> None:
    root = ElementTree.fromstring(svg(curves({HOSTILE: LOSSES}, HOSTILE), title=HOSTILE))  # noqa: S314
    assert root.get("aria-label") == HOSTILE
    assert [element.text for element in root.iter() if element.text and "script" in element.text] == [HOSTILE] * 2
    assert png(curves({r"$\frac{": LOSSES, "$$": LOSSES}, "$_")).startswith(b"\x89PNG")
