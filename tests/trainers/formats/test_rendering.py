"""Templates of reports: what they fill in stays one cell and one piece of code, and they ship with their rooms."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import UndefinedError
from shardwright.trainers.formats.rendering import code, render, table

ROOT = Path(__file__).parents[3]
STATISTICS = SimpleNamespace(evaluation_samples=16, source="some|data")
STRATEGY = SimpleNamespace(label="ZeRO-2")
MEMORY = SimpleNamespace(gpu=SimpleNamespace(peak_bytes=3 * 10**9, low_bytes=2 * 10**9, high_bytes=4 * 10**9))
RESULT = SimpleNamespace(steps=5, tokens=3200, step_seconds=2.0, tokens_per_second=1600.4, peak_bytes=None)
TEACHER = SimpleNamespace(reason="it fits beside the student")
RUN: dict[str, Any] = {
    "outcome": SimpleNamespace(
        teacher="org/large",
        student="org/small",
        statistics=STATISTICS,
        result=RESULT,
        seconds=9.4,
        plan=SimpleNamespace(
            hardware=SimpleNamespace(name="2xCPU"),
            chosen=SimpleNamespace(strategy=STRATEGY, reason="It is fast.", memory=MEMORY, teacher=TEACHER),
            versions=(("torch", "2"), ("deepspeed", "0.19")),
        ),
    ),
    "settings": {"dataset": "a|b", "seed": 0, "unset": None},
    "data": [("rows", "1,000")],
    "measures": table(("", "student"), [("perplexity", "3.2")]),
}
DISTILLATION = """\
# Distillation report

`org/large` taught `org/small`: 5 steps, 3,200 tokens in 2.0 s of training steps (1,600 tokens/s over all ranks), 9 s in all.

## On 16 held-out samples

|  | student |
|---|---|
| perplexity | 3.2 |

Means over all labelled tokens, each model reading the data's own tokens.

![loss and agreement](distillation.png)

## Where it ran

2xCPU, ZeRO-2. It is fast.

Teacher: it fits beside the student

|  | predicted | measured |
|---|---|---|
| largest memory of an accelerator | 3.0 GB (2.0 to 4.0) | not measured on CPU ranks |

## Data

|  |  |
|---|---|
| rows | 1,000 |

## Settings

| setting | value |
|---|---|
| `dataset` | `a\\|b` |
| `seed` | `0` |

Versions: torch 2, deepspeed 0.19.
"""  # noqa: E501


def test_a_report_is_what_it_was():
    assert render("distillation/command/templates/report.md.j2", **RUN) == DISTILLATION


@pytest.mark.parametrize(("share", "said"), [(None, ""), (0.5, "won back 50 % of it"), (1.5, "has learned this data")])
def test_a_report_says_what_training_won_back(share, said):
    values = RUN | {"facts": [("format", "x")], "share": share, "cost": "0.4"}
    values["outcome"] = SimpleNamespace(**vars(RUN["outcome"]), model="org/m", scheme=SimpleNamespace(name="W4A16"))
    text = render("qat/command/templates/report.md.j2", **values)
    assert said in text and ("Rounding alone" in text) == bool(said)
    assert text.startswith("# Quantization-aware training report\n\n`org/m` as W4A16: 5 steps, 3,200 tokens in 2.0 s")
    assert "\n\n\n" not in text and text.endswith("Versions: torch 2, deepspeed 0.19.\n")


@pytest.mark.parametrize("method", ["rtn", "spqr"])
def test_a_card_of_a_quantized_model(method):
    text = render(
        "quantization/templates/card.md.j2",
        source=SimpleNamespace(name="org/m", revision=None),
        scheme=SimpleNamespace(name="W4A16", storage="compressed-tensors"),
        method=method,
        loads=True,
        adapter=None,
        name=str,
        title=str,
        license=lambda _: "mit",
    )
    assert text.startswith(f"# org/m, W4A16\n\nQuantized from `org/m` by {method}. What it cost")
    assert ("    vllm serve DIRECTORY\n\nvLLM, SGLang and Transformers" in text) == (method == "rtn")
    assert "\n\n\n" not in text
    assert text.endswith("## License\n\n`org/m`: mit. Read its card before you publish this one.\n")


def test_a_value_that_is_not_given_is_an_error():
    with pytest.raises(UndefinedError):
        render("runs/templates/settings.md.j2")


@given(st.lists(st.text(max_size=12), min_size=2, max_size=2))
def test_cells_stay_cells(cells):
    lines = table(("a", "b"), [cells]).split("\n")
    assert len(lines) == 3
    assert len(re.findall(r"(?<!\\)\|", lines[2].replace("\\\\", ""))) >= 3


@given(st.text(max_size=20))
def test_code_has_a_fence_that_its_text_lacks(text):
    found = code(text)
    fence = re.match("`+", found)[0]
    assert found.endswith(fence) and "\n" not in found
    assert fence not in re.findall("`+", found[len(fence) : -len(fence)])


def test_templates_ship_with_their_rooms():
    shipped = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    rooms = {path.parent for path in ROOT.joinpath("trainers").rglob("templates")}
    assert rooms
    for room in rooms:
        assert "templates/*" in shipped[".".join(("shardwright", *room.relative_to(ROOT).parts))]
