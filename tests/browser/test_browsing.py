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


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_good_page_has_no_error(visitor: Visitor, tmp_path: Path, scheme) -> None:
    """A page of its own text, in both colour schemes."""
    (tmp_path / "good.html").write_text(
        '<!doctype html><html lang="en"><head><title>Good</title><meta name="color-scheme" content="light dark"></head>'
        "<body><main><h1>Good</h1></main></body></html>"
    )
    page = visitor.open(tmp_path / "good.html", scheme=scheme)
    assert page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches") == (scheme == "dark")
    assert accessibility_errors(page) == []


def test_contrast_is_checked_after_transitions(visitor: Visitor, tmp_path: Path) -> None:
    """A heading that fades in, beside a mark that turns forever."""
    (tmp_path / "fading.html").write_text(
        '<!doctype html><html lang="en"><head><title>Fading</title><style>@keyframes in { from { opacity: 0.2 } }'
        "@keyframes turn { to { rotate: 1turn } } h1 { animation: in 5s } i { animation: turn 1s infinite }</style>"
        "</head><body><main><h1>There</h1><i>o</i></main></body></html>"
    )
    assert accessibility_errors(visitor.open(tmp_path / "fading.html")) == []
