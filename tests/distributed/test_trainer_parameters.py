"""Optimizers, losses and metrics that scripts pass to `trainer_for` train under every layout as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from equivalence.records import records_of
from trainer_parameter_cases import CASES, REJECTIONS, Given

pytestmark = pytest.mark.distributed

WORKER = Path(__file__).with_name("trainer_parameter_cases.py")
TOLERANCE = 1e-5
ONCE = ("sgd", "nadam", "adamax", "resumed", "dpo_reference", "gkd_teacher")
NORM_TOLERANCE = 1e-4
"""Relative, as in the other tests of gradient norms."""


@pytest.fixture(scope="module")
def records(
    deepspeed_cpu_ops: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("parameters")
    parameters = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    selected = [each["case"] for each in parameters if isinstance(each.get("case"), Given)]
    references = [case.reference() for case in selected if case in CASES]
    return records_of([*selected, *references], directory, WORKER)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.once if case.kind in ONCE else ()) for case in CASES],
    ids=lambda case: case.name,
)
def test_script_arguments_match_one_process(case: Given, records: dict[str, dict[str, Any]]) -> None:
    record, expected = records[case.name], records[case.reference().name]
    assert "loss" in record, record
    print(case.name, max(abs(one - other) for one, other in zip(record["loss"], expected["loss"], strict=True)))
    if case.kind != "resumed":
        assert record.get("steps") == expected.get("steps")
    assert record["loss"] == pytest.approx(expected["loss"], abs=TOLERANCE, rel=0)
    if "learning_rate" in expected:
        assert record["learning_rate"] == pytest.approx(expected["learning_rate"], rel=1e-6)
    if case.layout != "zero0":
        assert record["grad_norm"] == pytest.approx(expected["grad_norm"], rel=NORM_TOLERANCE)
    assert record.get("metrics") == pytest.approx(expected["metrics"], abs=1e-6) if "metrics" in expected else True


@pytest.mark.parametrize("case", REJECTIONS, ids=lambda case: case.name)
def test_unsupported_script_arguments_are_rejected(case: Given, records: dict[str, dict[str, Any]]) -> None:
    assert REJECTIONS[case] in records[case.name].get("rejected", ""), records[case.name]
