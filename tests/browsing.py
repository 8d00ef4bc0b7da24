"""Pages in a real Chromium: what they report, what they ask of the network, and what axe-core finds in them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page

DESKTOP, PHONE = (1280, 900), (390, 844)
"""Widths and heights of windows, in CSS pixels."""
_NAMES = "chromium", "chromium-browser", "google-chrome"
_OWN_MACHINE = "127.0.0.1", "localhost"


def chromium_program() -> str | None:
    """Where this host has the browser; Playwright's own is never downloaded."""
    return next((found for name in _NAMES if (found := shutil.which(name))), None)


@contextmanager
def started_browser() -> Iterator[Browser]:
    """Yield a headless browser which reaches this machine alone."""
    from playwright.sync_api import sync_playwright

    # In containers Chromium has no user namespaces for its sandbox; a name that leads elsewhere is not resolved.
    nowhere = f"--host-resolver-rules=MAP * ~NOTFOUND, {', '.join(f'EXCLUDE {name}' for name in _OWN_MACHINE)}"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_program(), args=["--no-sandbox", nowhere])
        yield browser
        browser.close()


@dataclass(kw_only=True)
class Visitor:
    """Pages that a test opened in its own profile, and what is wrong with them."""

    browser: Browser
    pictures: Path | None = None
    """Where `picture` writes; nothing is written without."""
    errors: list[str] = field(default_factory=list)
    """Errors on the console, exceptions of scripts, and requests to other machines."""

    def open(
        self, address: str | Path, size: tuple[int, int] = DESKTOP, scheme: Literal["light", "dark"] = "light"
    ) -> Page:
        width, height = size
        context = self.browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, accept_downloads=True
        )
        page = context.new_page()
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.errors.append(f"exception: {error}"))
        page.on("request", lambda request: self._request(request.url))
        page.goto(address.resolve().as_uri() if isinstance(address, Path) else address)
        return page

    def picture(self, page: Page, name: str) -> None:
        """Store the whole page as `NAME.png`, where the session was asked for pictures."""
        if self.pictures is not None:
            page.screenshot(path=self.pictures / f"{name}.png", full_page=True)

    def close(self) -> None:
        for context in self.browser.contexts:
            context.close()

    def _console(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.errors.append(f"console: {message.text}")

    def _request(self, address: str) -> None:
        parts = urlsplit(address)
        if parts.scheme in {"http", "https", "ws", "wss"} and parts.hostname not in _OWN_MACHINE:
            self.errors.append(f"request to another machine: {address}")


def accessibility_errors(page: Page) -> list[str]:
    """What axe-core calls serious or critical: rule, element and way out, one line each."""
    from axe_playwright_python.sync_playwright import Axe

    return [
        f"{rule['impact']} {rule['id']}: {node['html'][:200]}: {node['failureSummary']}"
        for rule in Axe().run(page).response["violations"]
        if rule["impact"] in {"serious", "critical"}
        for node in rule["nodes"]
    ]
