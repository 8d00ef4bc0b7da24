"""Tables of figures on wide and on narrow terminals, and the command that comes next."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from shardwright.cli.show import print_figures, show_plan, show_settings
from shardwright.ds_configs.plan.gallery import gallery_entry, gallery_plan
from shardwright.ds_configs.specs.units import gigabytes

ROWS = (("perplexity", "3.0834 ± 0.0123", "3.0123 ± 0.0119", "+0.0711 ± 0.0021"), ("bytes", "4,123,456,789", "", ""))


@pytest.mark.parametrize("width", [120, 80, 40])
def test_names_and_figures_are_complete_at_every_width(width: int) -> None:
    out = Console(file=io.StringIO(), width=width)
    print_figures(out, ("", "model", "baseline", "difference"), ROWS)
    lines = out.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= width
    for cell in (cell for row in ROWS for cell in row):
        assert any(cell in line for line in lines), cell


@pytest.mark.parametrize("width", [120, 80, 40])
def test_a_plan_is_readable_at_every_width(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    plan = gallery_plan(gallery_entry("llama-3.1-8b_8xA100-80GB"))
    monkeypatch.setenv("COLUMNS", str(width))
    show_plan(plan, Path("plan"))
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines()[:-1])) <= width and "…" not in shown
    for other in plan.rejected:
        assert gigabytes(other.memory.gpu.high_bytes) in shown
    assert "Reasons: shardwright explain plan" in " ".join(shown.split())
    # Each layout is a line or three, not a column of words.
    assert width != 80 or len(shown.splitlines()) < 90


def test_settings_that_the_planner_chooses_are_shown_as_auto(capsys: pytest.CaptureFixture[str]) -> None:
    show_settings({"micro_batch_size": None, "teacher": None}, {"micro_batch_size": "default", "teacher": "default"})
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["micro_batch_size", "auto", "default"] in rows
    assert ["teacher", "None", "default"] in rows
