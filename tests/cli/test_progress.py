"""Progress of a training: a bar that fits its terminal, and lines where there is none."""

from __future__ import annotations

import io

import pytest
from planning import gallery_directory
from rich.console import Console
from shardwright.cli import progress
from shardwright.cli.progress import Bar, Lines, compared
from shardwright.ds_configs.plan.plan import Plan
from shardwright.plugins.launching.messages import Figures, Progress


def test_lines_show_figures_and_remaining_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([100.0, 120.0, 121.0, 140.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    draw = Lines()
    draw(Progress(what="step", done=1, total=10))
    for step in (3, 4, 5):
        figures = Figures(loss=2.3126, tokens_per_second=1204.4)
        draw(Progress(what="step", done=step, total=10, figures=figures))
    assert capsys.readouterr().err.splitlines() == [
        "note: step 1 of 10",
        "note: step 3 of 10, loss 2.313, 1,204 tokens/s, 70 s left",
        "note: step 5 of 10, loss 2.313, 1,204 tokens/s, 50 s left",
    ]


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_a_bar_compares_figures_with_the_plan(columns: int) -> None:
    plan = Plan.load(gallery_directory())
    speed, tensors = plan.chosen.time.tokens_per_second, plan.chosen.memory.gpu.allocated_bytes / 1e9
    console = Console(file=io.StringIO(), force_terminal=True, width=columns, color_system=None)
    bar = Bar("starting the ranks", console, plan)
    figures = Figures(loss=2.3126, tokens_per_second=speed / 2, peak_allocated_gb=tensors)
    bar(Progress(what="step", done=12, total=100, figures=figures))
    console.print(bar.shown.get_renderable())
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= columns
    shown = " ".join(" ".join(lines).split())
    assert "12/100" in shown and "loss 2.313" in shown and f"{speed / 2:,.0f} tokens/s (50% of the plan)" in shown
    assert f"{tensors:.1f} GB of {tensors:.1f} planned" in shown in shown
    # A plan counts padding too.
    padded = Figures(tokens_per_second=speed / 2, positions_per_second=speed)
    assert compared(padded, plan) == f"{speed / 2:,.0f} tokens/s (100% of the plan)"
