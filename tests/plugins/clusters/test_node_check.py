"""Comparison of machines: each difference names its machine, all together."""

from __future__ import annotations

from dataclasses import replace

from planning import public_model
from shardwright.ds_configs.plan.plan import make_plan
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.plugins.clusters import NodeFacts, node_errors

FACTS = NodeFacts(
    host="a",
    versions={"python": "3.12.1", "torch": "2.13.0"},
    gpus=8,
    files={"plan.json": "1", "ds_config.json": "2"},
)


def test_every_difference_is_reported_together() -> None:
    model = public_model("meta-llama--Llama-3.1-8B")
    plan = make_plan(model, parse_hardware("2x8xA100-80GB"), TrainingJob(strategy="zero3"))
    assert node_errors(plan, [FACTS, replace(FACTS, host="b")]) == []
    other = replace(
        FACTS,
        host="b",
        versions={"python": "3.12.1", "torch": "2.12.0", "peft": "0.21"},
        gpus=7,
        files={"plan.json": "1", "ds_config.json": "3"},
    )
    reported = [error.rule for error in node_errors(plan, [FACTS, other])]
    assert reported == [
        "b has peft 0.21, but a has none",
        "b has torch 2.12.0, but a has 2.13.0",
        "ds_config.json on b differs from a's",
        "b has 7, but the plan needs 8 x A100-80GB",
    ]
