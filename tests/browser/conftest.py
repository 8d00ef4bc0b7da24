"""One Chromium for a file of tests, and a visitor for each test that fails it for what its pages did wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import host
import pytest
from browsing import Visitor, started_browser

if TYPE_CHECKING:
    from playwright.sync_api import Browser


# Not for the session: while Playwright's synchronous interface is open, no other test of the process can run an event
# loop (playwright 1.65.2, `asyncio.run` raises).
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Return a browser, or pass the test over where the host has none."""
    host.require("chromium")
    with started_browser() as browser:
        yield browser


@pytest.fixture
def visitor(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Visitor]:
    """Return who opens pages; whatever these report as an error, or ask of another machine, fails the test."""
    pictures: Path | None = request.config.getoption("pictures")
    if pictures is not None:
        pictures.mkdir(parents=True, exist_ok=True)
    visitor = Visitor(browser=browser, pictures=pictures)
    yield visitor
    visitor.close()
    assert visitor.errors == []
