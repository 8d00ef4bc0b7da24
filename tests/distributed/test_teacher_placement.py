"""A teacher in every placement has the outputs of a replica, and does not change the student's training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cases import RANKS
from distillation_cases import models, save_models
from teacher_worker import CASES, STEPS, TeacherCase
from warm_ranks import OnDemand, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.once]

LOGIT_TOLERANCE = 1e-5
"""Largest difference of a logit in fp32. Seen: 0."""

Records = dict[TeacherCase, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def teacher_bytes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    from transformers import AutoModelForCausalLM

    directory = tmp_path_factory.mktemp("placement-models")
    save_models(directory)
    whole = AutoModelForCausalLM.from_pretrained(models(directory)[1])
    return directory, sum(parameter.numel() * 4 for parameter in whole.parameters())


@pytest.fixture(scope="module")
def records(
    teacher_bytes: tuple[Path, int], deepspeed_cpu_ops: None, tmp_path_factory: pytest.TempPathFactory
) -> Records:
    output = tmp_path_factory.mktemp("placement")

    def run(case: TeacherCase) -> list[dict[str, Any]]:
        run_ranks([Path(__file__).with_name("teacher_worker.py"), teacher_bytes[0], output, case.name], ranks=RANKS)
        return [json.loads((output / f"{case.name}-{rank}.json").read_text()) for rank in range(RANKS)]

    return OnDemand(run)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_placed_teacher_outputs_equal_a_replica(case: TeacherCase, records: Records) -> None:
    for record in records[case]:
        assert len(record["observed"]) == STEPS
        for seen in record["observed"]:
            assert seen["difference"] < LOGIT_TOLERANCE
            assert seen["head_difference"] == 0.0
            assert not seen["training"]
            assert not seen["requires_grad"]
            assert seen["gradients"] == 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_teacher_placement_keeps_student_losses(case: TeacherCase, records: Records) -> None:
    for beside, alone in zip(records[case], records[case.alone], strict=True):
        assert len(alone["losses"]) == STEPS
        assert beside["losses"] == pytest.approx(alone["losses"], abs=1e-6)
        assert alone["losses"][0] != pytest.approx(alone["losses"][1], abs=1e-3)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_only_sharded_teachers_split_weights_over_ranks(
    case: TeacherCase, records: Records, teacher_bytes: tuple[Path, int]
) -> None:
    shares = {"replica": 1.0, "sharded": 1 / RANKS, "offloaded": 1 / RANKS}
    assert case.placement is not None
    expected = shares[case.placement] * teacher_bytes[1]
    for record in records[case]:
        assert record["observed"][-1]["local_bytes"] == pytest.approx(expected, rel=0.01, abs=64)


@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=lambda case: case.name)
def test_frozen_copy_has_the_students_weights(case: TeacherCase, records: Records) -> None:
    """ZeRO-3 has partitioned the student while it was loaded."""
    for record in records[case]:
        assert record["is_partitioned"] == (case.zero_stage == 3)
        assert record["copy_difference"] == 0.0


def test_sharded_teacher_keeps_torch_linear_unpatched(records: Records) -> None:
    for case in CASES:
        if case.zero_stage != 3:
            assert not any(record["patched_linear"] for record in records[case]), case.name
