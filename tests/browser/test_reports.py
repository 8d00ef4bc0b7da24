"""Reports of real runs as people see them: in both schemes, at a desk, on a phone and on paper."""

from __future__ import annotations

from pathlib import Path

import pytest
from browsing import DESKTOP, PHONE, Visitor, accessibility_errors
from planning import gallery_directory
from shardwright.trainers.reports.runs import report_html

pytestmark = pytest.mark.browser
ROOT = Path(__file__).parents[2]
RUNS = ROOT / "tests" / "data" / "runs"
PAGES = {
    "plan": gallery_directory(),
    **{name: RUNS / name for name in ("train", "distill", "qat", "quantize")},
}


@pytest.mark.parametrize("name", PAGES)
def test_a_report_is_readable_everywhere(name: str, visitor: Visitor, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(report_html(PAGES[name]))
    for size, scheme in ((DESKTOP, "light"), (PHONE, "dark")):
        page = visitor.open(file, size, scheme)
        requests: list[str] = []
        page.on("request", lambda request, seen=requests: seen.append(request.url))
        page.reload()
        assert requests == [file.as_uri()], "the page is one file"
        assert accessibility_errors(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0], "only tables scroll sideways"
        visitor.picture(page, f"{name}-{scheme}-{size[0]}")
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.pdf().startswith(b"%PDF")
