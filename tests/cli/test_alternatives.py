"""Alternatives of one plan: terminal, plan.json, report, data frame and page show the same figures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from commands import Shell, shell_in
from paths import CONFIGS
from shardwright.cli.page.app import planned, settings_from
from shardwright.ds_configs.plan.plan import plan_from_dict
from shardwright.ds_configs.search.reasons import display_name
from shardwright.trainers.reports.plans import plan_report


def test_all_outputs_show_the_same_alternatives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, hardware, flags = "openai-community/gpt2", "2xT4", {"precision": "fp16", "seq_len": "1024"}
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
    (reported,) = next(each.tables for each in plan_report(plan).sections if each.heading == "Other layouts")
    column = reported.headings.index("tokens/s")
    assert [(row[0], row[column]) for row in reported.rows[: len(expected)]] == expected
    frame = plan.to_dataframe()
    layouts = (plan.chosen, *plan.rejected)
    assert list(frame["layout"]) == [layout.strategy.label for layout in layouts]
    assert list(frame["tokens_per_second"]) == [layout.time.tokens_per_second for layout in layouts]
    assert list(frame["peak_GB"]) == [layout.memory.gpu.peak_bytes / 1e9 for layout in layouts]
    on_page, _ = planned(settings_from({"model": model, "hardware": hardware} | flags))
    assert on_page.rejected == plan.rejected
