"""Markdown of reports and cards: a value stays one cell and one piece of code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shardwright.trainers.reports.make import read_report
from shardwright.trainers.reports.markdown import code, markdown, table, usage

RUNS = Path(__file__).parents[2] / "data" / "runs"


@pytest.mark.parametrize("name", ["train", "distill", "qat", "quantize", "evaluate"])
def test_markdown_has_every_figure_of_the_page(name):
    report = read_report(RUNS / name)
    text = markdown(report)
    tables = [*report.summary, *(shown for section in report.sections for shown in section.tables)]
    for cell in (cell for shown in tables for row in shown.rows for cell in row):
        assert re.sub(r"(\\*)\|", r"\1\1\|", cell) in text, cell
    assert "\n\n\n" not in text


@pytest.mark.parametrize(
    ("adapter", "line"),
    [
        (False, 'model = AutoModelForCausalLM.from_pretrained(".")'),
        (True, 'model = AutoPeftModelForCausalLM.from_pretrained(".")'),
    ],
)
def test_usage_loads_the_model_or_its_adapter(adapter, line):
    example = usage(adapter=adapter).split("```python\n")[1].split("```")[0]
    assert line in example.splitlines()
    compile(example, "card", "exec")


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
