"""Optimizers, losses and metrics that scripts pass to `trainer_for` train under every layout as in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from trainer_parameter_cases import CASES, REJECTIONS, Given
from warm_ranks import RanksFailedError, run_ranks

pytestmark = pytest.mark.distributed

WORKER = Path(__file__).with_name("trainer_parameter_worker.py")
TOLERANCE = 1e-5
NORM_TOLERANCE = 1e-4
"""Relative, as in the other tests of gradient norms."""


@pytest.fixture(scope="module")
def records(
    deepspeed_cpu_ops: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("parameters")
    parameters = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    selected = [each["case"] for each in parameters if isinstance(each.get("case"), Given)]
    references = {case.reference().name for case in selected if case in CASES}
    shared = _run_all(directory, [case.name for case in selected], ranks=2)
    return shared | _run_all(directory, sorted(references), ranks=1)


def _run_all(directory: Path, names: list[str], *, ranks: int) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    while waiting := [name for name in names if name not in found]:
        try:
            run_ranks([WORKER, directory, *waiting], ranks=ranks, timeout_seconds=60.0 + 20 * len(waiting))
        except RanksFailedError as error:
            print(error)
        for name in waiting:
            if (file := directory / f"{name}.0.json").is_file():
                found[name] = json.loads(file.read_text())
        if not any(name in found for name in waiting):
            found[waiting[0]] = {"error": "no record"}
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
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
