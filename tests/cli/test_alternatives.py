"""Alternatives of one plan: terminal, plan.json, report, data frame and page show the same figures."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from commands import Shell, shell_in
from paths import CONFIGS
from shardwright.cli.page.app import planned, settings_from
from shardwright.ds_configs.plan.plan import plan_from_dict
from shardwright.ds_configs.search.reasons import display_name
from shardwright.trainers.reports.make import report_html


class Tables(HTMLParser):
    """Rows of all tables of a page, as texts of their cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self._in_cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "table":
            self.tables.append([])
        elif tag == "tr" and self.tables:
            self.tables[-1].append([])
        elif tag in ("td", "th") and self.tables:
            self.tables[-1][-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._in_cell = False

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.tables[-1][-1][-1] += data


def layouts_of(page: str) -> list[tuple[str, str]]:
    """Return name and tokens per second of each row of the first table of layouts."""
    for headings, *rows in Tables(page).tables:
        names = [heading.strip().lower().replace("tokens per second", "tokens/s") for heading in headings]
        if names[0] == "layout" and "tokens/s" in names:
            column = names.index("tokens/s")
            return [(cells[0].strip(), cells[column].strip()) for cells in rows]
    raise AssertionError("the page has no table of layouts")


@pytest.mark.parametrize(
    ("model", "hardware", "flags"),
    [
        ("meta-llama/Llama-3.1-8B", "8xA100-80GB", {}),
        ("Qwen/Qwen2.5-0.5B", "2xRTX4090", {}),
        ("openai-community/gpt2", "2xT4", {"precision": "fp16", "seq_len": "1024"}),
    ],
)
def test_all_outputs_show_the_same_alternatives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model, hardware, flags
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shell: Shell = shell_in(tmp_path, "plan", capsys, monkeypatch)
    config = CONFIGS / model.replace("/", "--")
    options = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", value)]
    printed = shell(config, "--hardware", hardware, *options, "--output-dir", tmp_path / "p").out
    plan = plan_from_dict(json.loads((tmp_path / "p" / "plan.json").read_text()), source="plan.json")
    fitting = [candidate for candidate in plan.rejected if candidate.memory.fits]
    assert len(fitting) > 3
    speeds = [f"{candidate.time.tokens_per_second:,.0f}" for candidate in fitting]
    expected = [(display_name(candidate.strategy), speed) for candidate, speed in zip(fitting, speeds, strict=True)]

    table = printed.partition("Alternatives")[2]
    row = re.compile(r"^(\S.*?) {2,}\d+ +\S+ +[\d.]+ +([\d,]+) +[-+][\d.]+ %$", re.MULTILINE)
    assert [(name, speed) for name, speed in row.findall(table)] == expected
    assert layouts_of(report_html(tmp_path / "p"))[: len(expected)] == expected
    frame = plan.to_dataframe()
    layouts = (plan.chosen, *plan.rejected)
    assert list(frame["layout"]) == [layout.strategy.label for layout in layouts]
    assert list(frame["tokens_per_second"]) == [layout.time.tokens_per_second for layout in layouts]
    assert list(frame["peak_GB"]) == [layout.memory.gpu.peak_bytes / 1e9 for layout in layouts]
    on_page, _ = planned(settings_from({"model": model, "hardware": hardware} | flags))
    assert on_page.rejected == plan.rejected
