"""Renderings of reports: a value stays one cell, one piece of code and one label, and shows its error."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shardwright.cli import settings
from shardwright.trainers.reports import report, runs
from shardwright.trainers.reports.report import code, markdown, table
from shardwright.trainers.reports.runs import read_report

RUNS = Path(__file__).parents[2] / "data" / "runs"


@pytest.mark.parametrize("name", ["train", "distill", "qat", "quantize", "evaluate"])
def test_markdown_has_every_figure_of_the_page(name):
    shown_report = read_report(RUNS / name)
    text = markdown(shown_report)
    tables = [*shown_report.summary, *(shown for section in shown_report.sections for shown in section.tables)]
    for cell in (cell for shown in tables for row in shown.rows for cell in row):
        assert re.sub(r"(\\*)\|", r"\1\1\|", cell) in text, cell
    assert "\n\n\n" not in text


@given(st.lists(st.text(max_size=12), min_size=2, max_size=2))
def test_cells_stay_cells(cells):
    lines = table(("a", "b"), [cells]).split("\n")
    assert len(lines) == 3
    assert len(re.findall(r"(?<!\\)\|", lines[2].replace("\\\\", ""))) >= 3


@given(st.text(max_size=20))
def test_code_has_a_fence_that_its_text_lacks(text):
    shown = code(text)
    fence = re.match("`+", shown)[0]
    assert shown.endswith(fence) and "\n" not in shown
    assert fence not in re.findall("`+", shown[len(fence) : -len(fence)])


@pytest.mark.parametrize("module", [report, runs, settings])
def test_examples(module) -> None:
    assert doctest.testmod(module).failed == 0


def test_mean_with_error_returns_the_error_of_the_mean() -> None:
    mean, error = report.mean_with_error([1.0, 2.0, 3.0, 4.0])
    assert (mean, error) == (2.5, pytest.approx((5 / 3) ** 0.5 / 2))
    assert report.mean_with_error([1.0]) == (1.0, None)
