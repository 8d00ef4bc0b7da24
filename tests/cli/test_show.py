"""Tables of figures on wide and on narrow terminals, and the command that comes next."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from shardwright.cli.show import print_figures, show_plan
from shardwright.ds_configs.plan.gallery import GALLERY, gallery_entry, gallery_plan
from shardwright.ds_configs.search.reasons import display_name
from shardwright.ds_configs.specs.units import gigabytes
from shardwright.trainers.reports.runs import plan_report

ROWS = (("perplexity", "3.0834 ± 0.0123", "3.0123 ± 0.0119", "+0.0711 ± 0.0021"), ("bytes", "4,123,456,789", "", ""))


@pytest.mark.parametrize("width", [120, 80])
def test_names_and_figures_are_complete_at_every_width(width: int) -> None:
    out = Console(file=io.StringIO(), width=width)
    print_figures(out, ("", "model", "baseline", "difference"), ROWS)
    lines = out.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= width
    for cell in (cell for row in ROWS for cell in row):
        assert any(cell in line for line in lines), cell


@pytest.mark.parametrize("width", [120, 80])
def test_a_plan_is_readable_at_every_width(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    plan = gallery_plan(gallery_entry("llama-3.1-8b_8xA100-80GB"))
    monkeypatch.setenv("COLUMNS", str(width))
    show_plan(plan, Path("plan"), verbose=True)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines()[:-1])) <= width and "…" not in shown
    for other in plan.rejected:
        assert gigabytes(other.memory.gpu.high_bytes) in shown
    fitting = [display_name(other.layout) for other in plan.rejected if other.memory.fits]
    (reported,) = next(each.tables for each in plan_report(plan).sections if each.heading == "Other layouts")
    assert len(fitting) > 3 and [row[0] for row in reported.rows[: len(fitting)]] == fitting
    assert "Reasons: shardwright explain plan" in " ".join(shown.split())
    # Each layout is a line or three, not a column of words.
    assert width != 80 or len(shown.splitlines()) < 90


@pytest.mark.parametrize("entry", [entry.name for entry in GALLERY])
def test_the_first_screen_of_a_plan_has_24_lines_of_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    plan = gallery_plan(gallery_entry(entry))
    show_plan(plan, Path("plan"))
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= 24
    for text in (
        plan.chosen.reason.split(". ")[0],
        "tokens/s",
        "Host memory",
        "report.html",
        "shardwright explain plan",
    ):
        assert text in " ".join(shown.split())
    assert "\nRun: " in shown or "\nRun on each node: " in shown
