"""Layers of several kinds: what is offered trains as in one process, and what failed is not offered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from family_sweep.layouts import findings, verdict

STORED = Path(__file__).with_name("hybrid_legality.json")
TELLING = (
    ("Zamba2ForCausalLM", "zero3"),
    ("Qwen3NextForCausalLM", "zero3 lora"),
    ("Gemma3ForConditionalGeneration", "fsdp2"),
    ("DeepseekV2ForCausalLM", "ep"),
)
"""Parameters that layers share, linear attention beside attention, a frozen tower, experts beside a shared one."""


@pytest.mark.distributed
def test_hybrid_layers_train_as_in_one_process(tmp_path: Path) -> None:
    found = {(name, layout): finding for name, layout, finding in findings(TELLING, tmp_path)}
    assert {case: finding.said for case, finding in found.items() if finding.state != "passes"} == {}
    assert [verdict(*case) for case in TELLING] == [()] * len(TELLING)


@pytest.mark.slow
def test_planner_rejects_layouts_that_failed() -> None:
    rows = json.loads(STORED.read_text(encoding="utf-8"))
    judged = {(row["class"], row["layout"], row["state"]): bool(verdict(row["class"], row["layout"])) for row in rows}
    assert [one for one, refused in judged.items() if one[2] == "broken" and not refused] == []
