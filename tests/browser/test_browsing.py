"""The watch over pages sees what it is there for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browsing import PHONE, Visitor, accessibility_errors

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.browser

BAD = """<!doctype html><html><head><title>Bad</title></head><body><main>
<img src="https://example.com/pixel.png">
<p style="color: #ccc; background: #fff">pale</p>
<script>console.error("said aloud"); null.field</script></main></body></html>"""


def test_errors_requests_and_pale_text_are_seen(browser: Browser, tmp_path: Path) -> None:
    """Otherwise every other test of this folder passes whatever a page does."""
    (tmp_path / "bad.html").write_text(BAD)
    visitor = Visitor(browser=browser)
    page = visitor.open(tmp_path / "bad.html", PHONE)
    assert page.evaluate("window.innerWidth") == PHONE[0]
    found = {error.split()[1] for error in accessibility_errors(page)}
    visitor.close()
    assert found >= {"color-contrast:", "image-alt:", "html-has-lang:"}
    assert "console: said aloud" in visitor.errors
    assert "request to another machine: https://example.com/pixel.png" in visitor.errors
    assert any(error.startswith("exception: ") for error in visitor.errors)
