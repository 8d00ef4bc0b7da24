"""Progress of a training: a bar that fits its terminal, and lines where there is none."""

from __future__ import annotations

import io

import pytest
from planning import gallery_directory
from rich.console import Console
from shardwright.cli import progress
from shardwright.cli.progress import LinesAtTimes
from shardwright.cli.training import TrainingView
from shardwright.ds_configs.plan.plan import Plan
from shardwright.plugins.launching.messages import Figures

FIGURES = "loss 2.313, 1,204 tokens/s"


def test_lines_show_figures_and_remaining_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([100.0, 120.0, 121.0, 140.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    reported = LinesAtTimes()
    reported("step", 1, 10)
    reported.tell_figures(FIGURES)
    for step in (3, 4, 5):
        reported("step", step, 10)
    assert capsys.readouterr().err.splitlines() == [
        "note: step 1 of 10",
        f"note: step 3 of 10, {FIGURES}, 70 s left",
        f"note: step 5 of 10, {FIGURES}, 50 s left",
    ]


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_the_live_view_compares_figures_with_the_plan(columns: int) -> None:
    plan = Plan.load(gallery_directory())
    speed, gpu = plan.chosen.time.tokens_per_second, plan.chosen.memory.gpu
    console = Console(file=io.StringIO(), force_terminal=True, width=columns, color_system=None)
    view = TrainingView("starting the ranks", console, plan)
    assert view.rows() == []
    tensors = gpu.allocated_bytes / 1e9
    view.tell_figures(
        Figures(
            loss=2.3126, tokens_per_second=speed / 2, peak_allocated_gb=tensors, slowest_rank=3, slowest_rank_ratio=1.4
        )
    )
    view("step", 12, 100)
    rows = {name: text.plain for name, text in view.rows()}
    assert rows["loss"] == "2.3126"
    assert rows["tokens/s"] == f"{speed / 2:,.0f} of {speed:,.0f} planned (50 %)"
    assert rows["memory"].startswith(f"{tensors:.1f} GB of tensors, {tensors:.1f} planned")
    assert rows["ranks"].startswith("rank 3 is slow: 1.40 times the median")
    console.print(view.shown.get_renderable())
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= columns
    shown = " ".join(" ".join(lines).split())
    assert "12/100" in shown and "2.3126" in shown and "(50 %)" in shown
    counts = {"positions_per_second": speed, "labelled_tokens_per_second": speed / 4}
    view.tell_figures(Figures(tokens_per_second=speed / 2, **counts))
    ((_, padded),) = view.rows()
    assert padded.plain == (
        f"{speed / 2:,.0f}, {speed / 4:,.0f} with a label; {speed:,.0f} with padding of {speed:,.0f} planned (100 %)"
    )
    assert padded.spans[-1].style == "dim", "padding is not a slow run"
