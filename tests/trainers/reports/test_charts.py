"""Charts whose labels are hostile."""

from __future__ import annotations

from xml.etree import ElementTree

from shardwright.trainers.reports.charts import curves, svg

LOSSES = [(step, 3.0 / step) for step in range(1, 12)]
HOSTILE = '<script>alert("$x$")</script>'


def test_hostile_labels_stay_text() -> None:
    root = ElementTree.fromstring(svg(curves({HOSTILE: LOSSES}, HOSTILE), title=HOSTILE))  # noqa: S314
    assert root.get("aria-label") == HOSTILE
    assert [element.text for element in root.iter() if element.text and "script" in element.text] == [HOSTILE] * 2
    assert "$$" in svg(curves({r"$\frac{": LOSSES, "$$": LOSSES}, "$_"), title="")
