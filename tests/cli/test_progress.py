"""Progress of a training: a bar that fits its terminal, and lines where there is none."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from shardwright.cli import progress
from shardwright.cli.progress import Bar, LinesAtTimes

FIGURES = "loss 2.313, 1,204 tokens/s"


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_the_bar_fits(columns: int) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=columns, color_system=None)
    bar = Bar("starting the ranks", console)
    console.print(bar.shown.get_renderable())
    bar.tell_figures(FIGURES)
    bar("step", 12, 100)
    console.print(bar.shown.get_renderable())
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= columns
    assert len(lines) == 2 and "starting the ranks" in lines[0]
    said = " ".join(lines[1].split())
    assert "12/100" in said and "2.313" in said and "1,204" in said and "-:--" in said


def test_lines_tell_the_figures_and_what_is_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([100.0, 120.0, 121.0, 140.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    told = LinesAtTimes()
    told("step", 1, 10)
    told.tell_figures(FIGURES)
    for step in (3, 4, 5):
        told("step", step, 10)
    assert capsys.readouterr().err.splitlines() == [
        "note: step 1 of 10",
        f"note: step 3 of 10, {FIGURES}, 70 s left",
        f"note: step 5 of 10, {FIGURES}, 50 s left",
    ]
