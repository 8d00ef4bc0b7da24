"""The documentation site in a browser: nothing is too wide, pale or out of a keyboard's reach; the gallery filters."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import docs_site
import pytest
from browsing import DESKTOP, PHONE, Visitor, accessibility_errors
from shardwright.ds_configs.plan.gallery import GALLERY

pytestmark = [
    pytest.mark.browser,
    # myst-parser 5.2.0 asks sphinx 9.0.4 for an attribute that goes with 11.
    pytest.mark.filterwarnings("ignore:.myst_parser"),
]

PAGES = [
    *("index.md", "guides/evaluate.md", "measurements/qat.md", "gallery/index.md", "reference/commands/plan.md"),
]


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Requests are no output of a test."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve some pages of the site: axe-core reads their style sheets, which no browser allows it from files."""
    directory = tmp_path_factory.mktemp("site") / "site"
    assert docs_site.build(directory, only=PAGES) == 0
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(directory))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("page", PAGES)
def test_pages_fit_a_phone_and_have_no_serious_error(visitor: Visitor, site: str, page: str) -> None:
    for size, scheme in ((DESKTOP, "light"), (PHONE, "dark")):
        shown = visitor.open(f"{site}/{page.removesuffix('.md')}.html", size, scheme)
        visitor.picture(shown, f"site-{page.replace('/', '-').removesuffix('.md')}-{scheme}")
        assert shown.evaluate("document.documentElement.scrollWidth") == size[0], "only tables and code scroll sideways"
        assert accessibility_errors(shown) == []


def test_the_gallery_is_narrowed_by_words_and_by_memory(visitor: Visitor, site: str) -> None:
    shown = visitor.open(f"{site}/gallery/index.html")
    rows = shown.locator("#all-of-them tbody tr:visible")
    assert rows.count() == len(GALLERY)
    shown.get_by_label("words").fill("llama 80gb lora")
    assert [row.split(" on ")[0] for row in rows.all_inner_texts()] == ["Llama-3.1-8B"]
    shown.get_by_label("words").fill("")
    shown.get_by_label("most GB").fill("15")
    assert rows.count() == sum(float(row.split("\t")[3]) <= 15 for row in rows.all_inner_texts()) == 2
    assert shown.locator("#gallery-filter output").inner_text() == f"2 of {len(GALLERY)}"
