"""The page of `shardwright ui` in a real Chromium, from the real command, with a Hub on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browsing import accessibility_errors
from paths import CONFIGS
from readable_hub import readable_hub
from shardwright.cli.main import run

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.browser, pytest.mark.slow]

COMMAND = str(Path(sys.executable).parent / "shardwright")
BROKEN = '{\n  "train_batch_size": 7,\n  "zero_optimization": {\n    "stage": 3,\n    "overlap_com": true\n  }\n}'


FIELDS = ["Model", "Upload or paste a config.json", "Hardware", "Method", "Task", "Seq len", "Global batch size"]
RESULTS = ["Download the files as ZIP", "Kept; plan again to compare", "Address of this plan"]
FOCUSED = "() => { const e = document.activeElement; return e.labels?.[0]?.innerText || e.ariaLabel || e.innerText }"


def tabbed_to(page: Page, name: str) -> list[str]:
    """Press Tab until an element of this name has the focus, and return the names of those before it."""
    names: list[str] = []
    while len(names) < 60:
        page.keyboard.press("Tab")
        focused = page.evaluate(FOCUSED).partition("\n")[0].strip()
        if focused == name:
            return names
        names.append(focused)
    raise AssertionError(names)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server whose only Hub is on this machine."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "SHARDWRIGHT_"))}
    kept["SHARDWRIGHT_DATA_DIR"] = os.environ["SHARDWRIGHT_DATA_DIR"]
    home = tmp_path_factory.mktemp("home")
    with readable_hub() as hub, (home / "log").open("w") as log:
        kept |= {"HF_ENDPOINT": hub, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
        command = [COMMAND, "ui", "--port", "0"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=kept, cwd=home)
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
        process.terminate()
        assert process.wait(30) == 143
    assert (home / "log").read_text() == ""


def test_the_page_plans_checks_and_opens_a_shared_address(visitor, address, tmp_path, monkeypatch, capsys) -> None:
    page = visitor.open(address, (1280, 800))
    shared = page.locator("#address textarea, #address input")
    page.wait_for_function("(field) => field.value.includes('Llama-3.1-8B')", arg=shared.element_handle())
    assert page.get_by_label("Result").first.input_value()
    for name in ("Plan", "Keep to compare"):
        box = page.get_by_role("button", name=name, exact=True).bounding_box()
        assert box is not None
        assert box["y"] + box["height"] <= 800, "form and result are one screen"
    assert accessibility_errors(page) == []
    visitor.picture(page, "ui-desktop")
    page.get_by_role("button", name="Keep to compare").click()
    page.get_by_text("Kept; plan again").wait_for()

    page.get_by_label("Model", exact=True).fill("org/plain")
    page.get_by_label("Model", exact=True).press("Enter")
    page.locator("#seq_len textarea, #seq_len input").fill("2048")
    assert tabbed_to(page, "Plan")[:2] == ["Global batch size", "Strategy"]
    page.keyboard.press("Enter")
    page.wait_for_function("(field) => field.value.includes('org%2Fplain')", arg=shared.element_handle())
    page.get_by_text("kept plan").first.wait_for()
    after = tabbed_to(page, "Command")
    assert [name for name in after if name in RESULTS] == RESULTS, after
    assert "Layout" in after, "the table of figures has the focus, so that its keys scroll it"
    fields = tabbed_to(page, "Strategy")
    assert [name for name in fields if name in FIELDS] == FIELDS, fields
    with page.expect_download() as download:
        page.get_by_text("Download the files as ZIP").click()
    download.value.save_as(tmp_path / "plan.zip")
    with zipfile.ZipFile(tmp_path / "plan.zip") as packed:
        packed.extractall(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert run(["check", "plan"]) == 0
    assert "0 error(s), 0 warning(s)" in capsys.readouterr().out

    for scheme in ("light", "dark"):
        other = visitor.open(address + shared.input_value(), (390, 844), scheme)
        opened = other.locator("#address textarea, #address input").element_handle()
        other.wait_for_function("(field) => field.value.includes('org%2Fplain')", arg=opened)
        assert other.get_by_label("Model", exact=True).input_value() == "org/plain"
        assert other.locator("#seq_len textarea, #seq_len input").input_value() == "2048"
        assert other.evaluate("document.documentElement.scrollWidth") <= 390
        assert accessibility_errors(other) == []
        visitor.picture(other, f"ui-phone-{scheme}")

    page.get_by_text("Upload or paste a config.json").click()
    page.locator("input[type=file]").first.set_input_files(CONFIGS / "Qwen--Qwen2.5-0.5B" / "config.json")
    page.wait_for_function(
        "(field) => field.value.includes('qwen2')", arg=page.locator("#config textarea").element_handle()
    )
    page.get_by_role("button", name="Plan", exact=True).click()
    page.wait_for_function("(field) => field.value.startsWith('Upload')", arg=shared.element_handle())

    page.get_by_role("tab", name="Check a configuration").click()
    page.get_by_label("DeepSpeed, Accelerate or TRL file").fill(BROKEN)
    page.get_by_role("button", name="Check", exact=True).click()
    page.get_by_text("did you mean 'overlap_comm'?").first.wait_for()
    visitor.picture(page, "ui-check")
