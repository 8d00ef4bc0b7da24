"""Markdown of reports and cards: a value stays one cell and one piece of code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shardwright.trainers.reports.make import read_report
from shardwright.trainers.reports.markdown import code, markdown, table, usage
from shardwright.trainers.reports.report import Chart, Report, Section, Table, figures
from shardwright.trainers.reports.runs import serving_text

RUNS = Path(__file__).parents[2] / "data" / "runs"
REPORT = Report(
    kind="Training",
    title="org/small",
    subtitle="on some|data",
    summary=(figures([("Perplexity", "3.2", "before 5.1")]),),
    charts=[Chart(title, lambda axes: None, f"Note on {title}.") for title in "abc"],
    sections=(
        Section(
            "Results",
            ("First <line>.\nSecond.",),
            (Table(("", "value"), [("dataset", "a|b")], "Settings."),),
        ),
    ),
    command="shardwright train org/small",
    versions={"torch": "2", "deepspeed": "0.19"},
)
MARKDOWN = r"""# Training report

`org/small`: on some|data

| figure | value | detail |
|---|---|---|
| Perplexity | 3.2 | before 5.1 |

DRAWN

a. Note on a.

b. Note on b.

c. Note on c.

## Results

First \<line>. Second.

Settings.

|  | value |
|---|---|
| dataset | a\|b |

## How this was made

`shardwright train org/small`

torch 2, deepspeed 0.19
"""


def test_markdown_has_every_part_of_the_report():
    assert markdown(REPORT, charts="DRAWN") == MARKDOWN
    assert "Note on a" not in markdown(REPORT)


@pytest.mark.parametrize("name", ["train", "distill", "qat", "quantize", "evaluate"])
def test_markdown_has_every_figure_of_the_page(name):
    report = read_report(RUNS / name)
    text = markdown(report)
    tables = [*report.summary, *(shown for section in report.sections for shown in section.tables)]
    for cell in (cell for shown in tables for row in shown.rows for cell in row):
        assert re.sub(r"(\\*)\|", r"\1\1\|", cell) in text, cell
    assert "\n\n\n" not in text


def test_cards_of_quantized_models_name_the_libraries_that_load_them():
    assert "vLLM, SGLang and Transformers read the format" in serving_text("rtn", "compressed-tensors")
    assert "through bitsandbytes" in serving_text("rtn", "bitsandbytes")
    assert "No engine computes with the compact format" in serving_text("spqr", "compressed-tensors")


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
