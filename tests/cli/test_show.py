"""Tables of figures on wide and on narrow terminals, and the command that comes next."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from shardwright.cli.show import print_compared, show_next

ROWS = (("perplexity", "3.0834 ± 0.0123", "3.0123 ± 0.0119", "+0.0711 ± 0.0021"), ("bytes", "4,123,456,789", "", ""))


@pytest.mark.parametrize("width", [120, 80, 40])
def test_no_name_and_no_figure_is_cut(width: int) -> None:
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
