"""The page of `shardwright ui` in a real Chromium, from the real command, with a Hub on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browsing import PHONE, Visitor, accessibility_errors
from paths import CONFIGS
from readable_hub import readable_hub
from shardwright.cli.main import run
from shardwright.plugins.huggingface_hub.hub import http_client

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.browser, pytest.mark.slow]

WIDE = (1440, 900)
COMMAND = str(Path(sys.executable).parent / "shardwright")
MODELS = CONFIGS
BROKEN = """{
  "train_batch_size": 7,
  "fp16": {"enabled": true},
  "bf16": {"enabled": true},
  "zero_optimization": {
    "stage": 3,
    "overlap_com": true
  }
}"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The page of a server of its own, whose only Hub is on this machine."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "SHARDWRIGHT_"))}
    kept["SHARDWRIGHT_DATA_DIR"] = os.environ["SHARDWRIGHT_DATA_DIR"]
    home = tmp_path_factory.mktemp("home")
    with readable_hub() as hub:
        kept |= {"HF_ENDPOINT": hub, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
        log = (home / "log").open("w")
        process = subprocess.Popen(
            [COMMAND, "ui", "--port", "0"], stdout=subprocess.PIPE, stderr=log, text=True, env=kept, cwd=home
        )
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
        process.terminate()
        assert process.wait(30) == 143
        log.close()
        assert (home / "log").read_text() == ""


def opened(visitor: Visitor, address: str, query: str = "", **how) -> Page:
    page = visitor.open(address + query, **({"size": WIDE} | how))
    page.locator(".results h2").first.wait_for()
    return page


def shown_plan(page: Page, *texts: str) -> None:
    """Wait until the head of the plan contains all of these."""
    for text in texts:
        page.locator(".choice", has_text=text).wait_for()


def upload(page: Page, path: Path) -> None:
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Upload a config.json").click()
    chooser.value.set_files(path)


def test_a_plan_for_two_nodes_has_files_that_pass_check(visitor, address, tmp_path, monkeypatch, capsys) -> None:
    page = opened(visitor, address)
    shown_plan(page, "meta-llama/Llama-3.1-8B", "8xA100-80GB", "ZeRO-3")
    visitor.picture(page, "ui-desktop")
    assert accessibility_errors(page) == []

    page.get_by_label("Nodes", exact=True).fill("2")
    shown_plan(page, "on 2x8xA100-80GB")
    page.wait_for_url("**/?model=meta-llama%2FLlama-3.1-8B&hardware=2x8xA100-80GB")

    upload(page, MODELS / "Qwen--Qwen2.5-0.5B" / "config.json")
    shown_plan(page, "config.json", "Qwen2ForCausalLM, 494.03 M parameters", "on 2x8xA100-80GB")
    assert page.get_by_label("Model", exact=True).input_value() == "config.json (uploaded)"
    with page.expect_download() as download:
        page.get_by_role("link", name="Download").click()
    archive = tmp_path / download.value.suggested_filename
    download.value.save_as(archive)
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(tmp_path)
    directory = tmp_path / archive.stem
    assert json.loads((directory / "config.json").read_text())["model_type"] == "qwen2"
    monkeypatch.chdir(directory)
    assert run(["check", "."]) == 0
    assert "0 error(s), 0 warning(s)" in capsys.readouterr().out

    again = opened(visitor, address, page.url.removeprefix(address).lstrip("/"))
    shown_plan(again, "config.json", "Qwen2ForCausalLM, 494.03 M parameters", "on 2x8xA100-80GB")


def test_marks_have_labels_and_headings_sort(visitor, address) -> None:
    page = opened(visitor, address)
    page.locator(".segment.activations").first.hover()
    assert "GB in the phase" in page.locator("#tip").inner_text()
    page.locator(".plot .mark.too-large").first.hover()
    assert "needs up to" in page.locator("#tip").inner_text()
    heading = page.get_by_role("button", name="Needs up to, GB")
    heading.click()
    sizes = [int(cell.get_attribute("data-value")) for cell in page.locator(".layouts td:nth-child(4)").all()]
    assert len(sizes) > 10 and sizes == sorted(sizes)
    heading.click()
    sizes = [int(cell.get_attribute("data-value")) for cell in page.locator(".layouts td:nth-child(4)").all()]
    assert sizes == sorted(sizes, reverse=True)
    assert page.locator(".layouts th[aria-sort=descending]").count() == 1


def test_a_pasted_configuration_is_checked_line_by_line(visitor, address) -> None:
    page = opened(visitor, address)
    page.get_by_role("tab", name="Check a configuration").click()
    pasted = page.get_by_label("DeepSpeed JSON or Accelerate YAML")
    pasted.fill(BROKEN)
    page.get_by_label("Ranks of the job").fill("8")
    page.get_by_role("button", name="Check", exact=True).click()
    page.locator("#check-title", has_text="3 errors").wait_for()
    found = [" ".join(one.inner_text().split()) for one in page.locator(".findings li.error").all()]
    assert [text.split("line ")[1].split()[0] for text in found] == ["2", "3", "7"]
    assert "did you mean 'overlap_comm'?" in found[2] and '"overlap_com": true' in found[2]
    visitor.picture(page, "ui-check")
    assert accessibility_errors(page) == []

    pasted.evaluate(
        "(field) => { field.value = '{\"a\": \"' + 'x'.repeat(10_000_000); field.dispatchEvent(new Event('input')) }"
    )
    page.get_by_role("button", name="Check", exact=True).click()
    page.locator(".findings", has_text="1048576").wait_for(timeout=60_000)


def test_errors_of_an_address_are_shown_as_lines(visitor, address) -> None:
    page = opened(visitor, address, "?model=%3Cimg+src=x+onerror=alert(1)%3E&hardware=/etc/hosts.yaml")
    said = page.locator(".errors").inner_text()
    assert "model = '<img src=x onerror=alert(1)>': is not a Hub id" in said
    assert "hardware = '/etc/hosts.yaml': must have the form [[NODESx]GPUSx]GPU" in said
    assert accessibility_errors(page) == []


def test_other_host_names_and_origins_are_rejected(address) -> None:
    answer = http_client().get(address)
    assert answer.status_code == 200 and "default-src 'self'" in answer.headers["content-security-policy"]
    assert http_client().get(address, headers={"Host": "example.com"}).status_code == 400


def test_hostile_uploads_and_models_that_do_not_fit(visitor, address, tmp_path) -> None:
    page = opened(visitor, address, "?model=meta-llama/Llama-3.1-70B&hardware=1xT4&precision=fp16")
    assert "No layout fits" in page.locator(".misfit").inner_text()
    assert "Changes that would fit" in page.locator(".misfit").inner_text()
    assert accessibility_errors(page) == []
    config = json.loads((MODELS / "Qwen--Qwen2.5-0.5B" / "config.json").read_text()) | {"num_hidden_layers": 10**6}
    (tmp_path / "config.json").write_text(json.dumps(config))
    upload(page, tmp_path / "config.json")
    page.locator(".errors", has_text="num_hidden_layers = 1000000").wait_for()
    assert page.get_by_label("Model", exact=True).input_value() == "meta-llama/Llama-3.1-70B"


def test_two_browsers_share_nothing(visitor, address) -> None:
    first, second = opened(visitor, address), opened(visitor, address, "?model=org/plain&hardware=2xRTX4090")
    shown_plan(second, "org/plain", "2xRTX4090")
    first.get_by_label("qlora").check()
    first.wait_for_url("**method=qlora**")
    second.get_by_role("button", name="Plan", exact=True).click()
    second.wait_for_timeout(500)
    assert "method" not in second.url
    shown_plan(second, "org/plain", "2xRTX4090")
    assert second.get_by_label("full", exact=True).is_checked()
    assert first.get_by_label("Model", exact=True).input_value() == "meta-llama/Llama-3.1-8B"


def test_the_page_works_on_a_phone_and_by_keyboard(visitor, address) -> None:
    page = opened(visitor, address, size=PHONE, scheme="dark")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE[0]
    visitor.picture(page, "ui-phone")
    assert accessibility_errors(page) == []

    def tab_to(selector: str, most: int = 60) -> None:
        for _ in range(most):
            if page.evaluate("(wanted) => document.activeElement?.matches(wanted) ?? false", selector):
                return
            page.keyboard.press("Tab")
        pytest.fail(f"{selector} is not reached by keyboard")

    page.locator("body").focus()
    tab_to("#model input")
    page.keyboard.press("Control+A")
    page.keyboard.type("org/plain")
    page.keyboard.press("Enter")
    tab_to("#nodes input")
    page.keyboard.press("ArrowUp")
    tab_to("#run")
    page.keyboard.press("Enter")
    shown_plan(page, "org/plain", "on 2x8xA100-80GB")
    tab_to(".plot .mark")
    page.keyboard.press("ArrowRight")
    page.locator("#tip b").wait_for()
    page.keyboard.press("Escape")
    assert not page.locator("#tip").is_visible()
    tab_to(".layouts thead button")
    page.keyboard.press("Enter")
    assert page.locator("th[aria-sort]").count() == 1
    tab_to("a[download]")


def test_search_lists_models_of_the_hub(visitor, address) -> None:
    page = opened(visitor, address)
    page.get_by_role("button", name="Search the Hub, revision").click()
    page.get_by_label("Search the Hub", exact=True).fill("shard")
    page.get_by_role("button", name="Search", exact=True).click()
    page.locator("#found", has_text="Found: 1").wait_for()
    page.get_by_label("Model", exact=True).click()
    page.get_by_role("option", name="org/sharded").click()
    shown_plan(page, "org/sharded")
    began = time.monotonic()
    page.get_by_label("lora", exact=True).check()
    page.wait_for_url("**method=lora**")
    assert time.monotonic() - began < 60
