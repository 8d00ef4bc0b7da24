"""One Trainer that evaluates first, trains several times and is interrupted gives the figures of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from equivalence.cases import Case
from equivalence.records import records_of
from equivalence.settings import reference_of

pytestmark = pytest.mark.distributed

ENGINES = ("ddp", "zero0", "zero1", "zero2", "zero3", "fsdp2")
OTHERS = (
    *("sp2-zero1", "sp2-zero3", "cp2-fsdp2", "tp2-zero1", "pp2-zero0", "ep2-zero2"),
    *("zero2-offload", "zero3-offload-param"),
)
KINDS = ("lora", "model_init", "schedule_of_deepspeed", "stock")


def staged(layout: str, *kinds: str) -> Case:
    return Case(layout=layout, settings=("stages", *kinds), accumulation=2)


CASES = [
    *(staged(layout) for layout in (*ENGINES, *OTHERS)),
    *(staged(layout, kind) for layout in ENGINES for kind in KINDS),
]
TOLERANCE = 1e-5
NORM_TOLERANCE = 1e-4
"""Relative, as in the other tests of gradient norms."""


@pytest.fixture(scope="module")
def records(
    deepspeed_cpu_ops: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    parameters = [item.callspec.params for item in request.session.items if item.path == Path(__file__)]
    selected = [each["case"] for each in parameters]
    directory = tmp_path_factory.mktemp("prepared")
    worker = Path(__file__).with_name("prepared_cases.py")
    return records_of([*selected, *map(reference_of, selected)], directory, worker)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_evaluations_and_training_runs_in_any_order_match_one_process(
    case: Case, records: dict[str, dict[str, Any]]
) -> None:
    record, expected = records[case.name], records[reference_of(case).name]
    assert "error" not in record and "error" not in expected, record.get("error", expected.get("error"))
    if "schedule_of_deepspeed" in case.settings:
        # DeepSpeed's own schedules have other rates than those of Transformers; each run must begin a new one.
        rates = record["learning_rate of first stage"]
        assert len(set(rates)) > 1 and record["learning_rate of second stage"] == rates
        return
    # A pipeline cannot predict, and context parallelism cannot evaluate either.
    missing = {"pp": ("prediction",), "cp": ("prediction", "evaluation")}.get(case.layout[:2], ())
    expected = {name: figures for name, figures in expected.items() if not any(word in name for word in missing)}
    assert record.keys() == expected.keys()
    for name, figures in expected.items():
        if name.startswith("grad_norm") and case.layout == "zero0" and "stock" in case.settings:
            # DeepSpeed's ZeRO-0 without the corrections of a plan reports no norm.
            assert record[name] == []
        elif name.startswith("grad_norm"):
            assert record[name] == pytest.approx(figures, rel=NORM_TOLERANCE), name
        else:
            assert record[name] == pytest.approx(figures, abs=TOLERANCE, rel=0), name
