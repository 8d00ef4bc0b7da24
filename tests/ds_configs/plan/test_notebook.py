"""A plan in Python and in a notebook: one line, escaped HTML, and rows of all layouts."""

from __future__ import annotations

from dataclasses import replace

from planning import llama
from shardwright.ds_configs.plan.plan import make_plan
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob


def test_a_plan_is_one_line_a_table_and_escaped_html() -> None:
    plan = make_plan(
        llama(hidden_size=64, intermediate_size=128), parse_hardware("2xCPU"), TrainingJob(seq_len_tokens=64)
    )
    named = replace(plan, model=replace(plan.model, name="<script>alert(1)</script>"))
    line = repr(plan)
    assert plan.chosen.strategy.label in line and "2xCPU" in line and "\n" not in line and len(line) < 200
    frame = plan.to_dataframe()
    assert next(iter(frame["layout"])) == plan.chosen.strategy.label and len(frame) == 1 + len(plan.rejected)
    assert frame["peak_GB"][0] == plan.chosen.memory.gpu.peak_bytes / 1e9
    shown = named._repr_html_()
    assert f"in the {plan.chosen.memory.gpu.phase} phase, GB" in shown
    for key in ("weights 0.", "activations 0.", "runtime and communicators 1.", "in the interval", "free, of 8.6 GB"):
        assert key in shown.partition("<table>")[0], key
    assert "<script>" not in shown and "&lt;script&gt;" in shown and shown.count("<tr>") == len(frame) + 1
