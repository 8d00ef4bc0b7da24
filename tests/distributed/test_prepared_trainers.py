"""One Trainer that evaluates first, trains several times and is interrupted gives the figures of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from equivalence.records import records_of
from prepared_cases import KINDS, OTHERS, WITHOUT_AXES, Staged

pytestmark = pytest.mark.distributed

CASES = [
    *(Staged(layout=layout) for layout in (*WITHOUT_AXES, *OTHERS)),
    *(Staged(layout=layout, kind=kind) for layout in WITHOUT_AXES for kind in KINDS if kind != "stock"),
    *(Staged(layout=layout, kind="stock") for layout in WITHOUT_AXES),
]
TOLERANCE = 1e-5
NORM_TOLERANCE = 1e-4
"""Relative, as in the other tests of gradient norms."""


@pytest.fixture(scope="module")
def records(
    deepspeed_cpu_ops: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    parameters = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    selected = [each["case"] for each in parameters if isinstance(each.get("case"), Staged)]
    references = [case.reference() for case in selected]
    directory = tmp_path_factory.mktemp("prepared")
    return records_of([*selected, *references], directory, Path(__file__).with_name("prepared_cases.py"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_evaluations_and_training_runs_in_any_order_match_one_process(
    case: Staged, records: dict[str, dict[str, Any]]
) -> None:
    record, expected = records[case.name], records[case.reference().name]
    assert "error" not in record and "error" not in expected, record.get("error", expected.get("error"))
    if case.kind == "schedule":
        # DeepSpeed's own schedules have other rates than those of Transformers; each run must begin a new one.
        rates = record["learning_rate of first stage"]
        assert len(set(rates)) > 1 and record["learning_rate of second stage"] == rates
        return
    # A pipeline cannot predict, and context parallelism cannot evaluate either.
    missing = {"pp": ("prediction",), "cp": ("prediction", "evaluation")}.get(case.layout[:2], ())
    expected = {name: figures for name, figures in expected.items() if not any(word in name for word in missing)}
    assert record.keys() == expected.keys()
    for name, figures in expected.items():
        if name.startswith("grad_norm") and case.name == "stock-zero0":
            assert record[name] == []
        elif name.startswith("grad_norm"):
            assert record[name] == pytest.approx(figures, rel=NORM_TOLERANCE), name
        else:
            assert record[name] == pytest.approx(figures, abs=TOLERANCE, rel=0), name
