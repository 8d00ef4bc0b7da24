"""Tables of figures on wide and on narrow terminals, and the command that comes next."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from shardwright.cli.show import memory_bar, print_compared, print_rows, show_next, show_plan
from shardwright.ds_configs.plan.gallery import gallery_entry, gallery_plan
from shardwright.ds_configs.specs.units import gigabytes

ROWS = (("perplexity", "3.0834 ± 0.0123", "3.0123 ± 0.0119", "+0.0711 ± 0.0021"), ("bytes", "4,123,456,789", "", ""))


@pytest.mark.parametrize("width", [120, 80, 40])
def test_names_and_figures_are_complete_at_every_width(width: int) -> None:
    out = Console(file=io.StringIO(), width=width)
    print_compared(out, ("model", "baseline", "difference"), ROWS)
    lines = out.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= width
    for cell in (cell for row in ROWS for cell in row):
        assert any(cell in line for line in lines), cell


def test_the_next_command_stays_on_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    show_next("shardwright", "quantize", "a place/" * 10, "--scheme", "W4A16")
    assert capsys.readouterr().out == f"Next: shardwright quantize '{'a place/' * 10}' --scheme W4A16\n"


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


def test_the_memory_bar_is_ascii_if_the_encoding_lacks_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = gallery_plan(gallery_entry("llama-3.1-8b_8xA100-80GB")).chosen.memory.gpu
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert memory_bar(gpu).plain.startswith("[####") and memory_bar(gpu).plain.isascii()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    assert memory_bar(gpu).plain.startswith("[████")


@pytest.mark.parametrize(
    ("columns", "lines"),
    [
        (60, [f"name{' ' * 18}size  what it is", "a name of some words     1  a sentence that may be folded"]),
        (40, ["a name of some words", "  size: 1", "  what it is: a sentence that may be", "  folded"]),
    ],
)
def test_rows_that_do_not_fit_become_blocks(columns: int, lines: list[str]) -> None:
    out = Console(file=io.StringIO(), width=columns)
    row = ("a name of some words", "1", "a sentence that may be folded")
    print_rows(out, ("name", "size", "what it is"), [row], figures=("size",), folded={"what it is": 20})
    shown = [line.rstrip() for line in out.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert shown == lines


def test_headings_are_folded_before_a_table_becomes_blocks() -> None:
    headings, row = ("layout", "micro-batch", "s per step", "predicted tensors"), ("DDP", "2 x 1", "0.107", "3.34 MB")
    for columns, lines in (
        (50, ["layout  micro-batch  s per step  predicted tensors", "DDP     2 x 1        0.107       3.34 MB"]),
        (40, ["        micro-  s per  predicted", "layout  batch   step   tensors", "DDP     2 x 1   0.107  3.34 MB"]),
        (29, ["DDP", "  micro-batch: 2 x 1", "  s per step: 0.107", "  predicted tensors: 3.34 MB"]),
    ):
        out = Console(file=io.StringIO(), width=columns)
        print_rows(out, headings, [row])
        shown = [line.rstrip() for line in out.file.getvalue().splitlines()]  # type: ignore[attr-defined]
        assert shown == lines
