"""Trainers with drawn options, families and layouts train as one process does, or are rejected before a step.

`pytest tests/distributed/test_drawn_trainers.py --draw 100 --seed 3` draws a hundred of them.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from drawn_trainers import drawn_trainers, outcome
from equivalence.records import records_of
from trainer_cases import TrainerCase, make_models_and_data

pytestmark = [pytest.mark.distributed, pytest.mark.needs("trl"), pytest.mark.once]

WORKER = Path(__file__).with_name("trainer_cases.py")
FOUND: dict[TrainerCase, str] = {
    TrainerCase(trainer="sft", layout="zero1", options=("polynomial",)): "rejected",
    TrainerCase(trainer="trainer", layout="zero0", options=("polynomial", "embedding_frozen")): "equal",
    TrainerCase(trainer="trl_distillation", layout="fsdp2", family="gpt2", accumulation=2): "rejected",
    TrainerCase(trainer="gkd", layout="ddp", family="gpt2", accumulation=2): "rejected",
    TrainerCase(trainer="sft_smoothed", layout="sp"): "rejected",
    TrainerCase(trainer="sft", layout="ddp", family="gpt2", options=("evaluated", "every_token")): "equal",
    TrainerCase(trainer="dpo", layout="zero1", options=("mixed",)): "equal",
    TrainerCase(trainer="reward", layout="ddp", family="gpt2", options=("fused_adamw", "smoothed")): "equal",
    TrainerCase(
        trainer="reward", layout="zero_offload", family="qwen3_moe", options=("adamw", "lora"), accumulation=2
    ): "equal",
    TrainerCase(trainer="sft", layout="zero3", family="tied", options=("own_sgd",), accumulation=2): "equal",
}
"""Cases that once failed or trained differently, and their expected results."""


def test_random_setups_train_as_one_process_or_are_rejected(
    deepspeed_cpu_ops: None, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    drawn = drawn_trainers(request.config.getoption("--draw"), request.config.getoption("--seed"))
    cases = list(dict.fromkeys([*FOUND, *drawn]))
    make_models_and_data(tmp_path / "models", cases)
    records = records_of([*(case.reference() for case in cases), *cases], tmp_path, worker=WORKER)
    outcomes = {case: outcome(case, records[case.name], records[case.reference().name], tmp_path) for case in cases}
    for case, one in outcomes.items():
        print(f"{case.name}: {one.verdict} {one.difference:.1e} {one.said.splitlines()[0][:200] if one.said else ''}")
    largest = max(one.difference for one in outcomes.values() if one.verdict == "equal")
    print(dict(Counter(one.verdict for one in outcomes.values())), f"largest difference {largest:.1e}")
    assert not {case.name: one.said for case, one in outcomes.items() if one.verdict == "wrong"}
    assert {case: outcomes[case].verdict for case in FOUND} == FOUND
