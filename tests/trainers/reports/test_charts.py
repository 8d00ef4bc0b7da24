"""Charts: hostile names, and SVG that is the same for the same values."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from shardwright.trainers.reports.charts import curves, svg

LOSSES = [(step, 3.0 / step) for step in range(1, 12)]
HOSTILE = '<script>alert("$x$")</script>'
DRAWN = curves({"loss": LOSSES, "KL": LOSSES}, "nats", expected=(1, 0.5, 2))


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
    assert "$$" in svg(curves({r"$\frac{": LOSSES, "$$": LOSSES}, "$_"), title="")
