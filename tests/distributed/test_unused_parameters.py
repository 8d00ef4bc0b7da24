"""Rows that decide which parameters run: ranks that use different ones train as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from equivalence.records import marked, records_of
from unused_cases import KINDS, Unused

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(3600)]

LAYOUTS = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
# First the layouts that gather or reduce other parameters where ranks use different ones: `make test` keeps those.
CASES = [
    *(Unused(layout="zero3", model=model) for model in ("shifts", "adapters")),
    *(Unused(layout=layout, model="images") for layout in ("fsdp2", "zero2")),
    *(Unused(layout=layout, model="heads", is_stock=True) for layout in ("fsdp2", "zero2")),
    *(Unused(layout=layout, model="heads", checkpointing="non-reentrant") for layout in reversed(LAYOUTS)),
    *(Unused(layout=layout, model="heads", checkpointing="reentrant") for layout in ("zero3", "zero2")),
    *(Unused(layout=layout, model=model) for layout in LAYOUTS for model in KINDS),
    Unused(layout="fsdp2", model="images", checkpointing="non-reentrant"),
]
CASES = list(dict.fromkeys(CASES))
RECOMPUTED = [Unused(layout="zero3", model="adapters", checkpointing=kind) for kind in ("non-reentrant", "reentrant")]
UPSTREAM = [Unused(layout=layout, model="shifts", is_upstream=True) for layout in ("zero2", "zero3")]
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def records(
    deepspeed_cpu_ops: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    parameters = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    selected = [each["case"] for each in parameters if isinstance(each.get("case"), Unused)]
    references = [case.reference() for case in selected]
    directory = tmp_path_factory.mktemp("unused")
    return records_of([*selected, *references], directory, Path(__file__).with_name("unused_cases.py"))


@pytest.mark.parametrize(
    "case",
    marked(CASES, lambda case: (case.layout, case.model, case.checkpointing, case.is_stock)),
    ids=lambda case: case.name,
)
def test_ranks_that_use_different_parameters_train_as_one_process(
    case: Unused, records: dict[str, dict[str, Any]]
) -> None:
    record, expected = records[case.name], records[case.reference().name]
    assert "error" not in record and "error" not in expected, record.get("error", expected.get("error"))
    assert record.keys() == expected.keys()
    for name, figures in expected.items():
        assert record[name] == pytest.approx(figures, abs=TOLERANCE, rel=0), name


@pytest.mark.parametrize("case", RECOMPUTED, ids=lambda case: case.name)
def test_modules_that_a_rank_would_recompute_alone_are_an_error(
    case: Unused, records: dict[str, dict[str, Any]]
) -> None:
    record = records[case.name]
    assert record["steps"] == 0
    assert "adapters.0.weight" in record["refused"] and "rank 1" in record["refused"]


@pytest.mark.parametrize("case", UPSTREAM, ids=lambda case: case.name)
def test_zero_still_adds_gradients_of_different_parameters(case: Unused, records: dict[str, dict[str, Any]]) -> None:
    losses = records[case.name]["loss"]
    expected = records[case.reference().name]["loss"]
    assert losses[0] == pytest.approx(expected[0], abs=TOLERANCE) and losses != pytest.approx(expected, abs=TOLERANCE)
