"""TRL's preference and reinforcement learning trainers log under every layout what one process logs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from equivalence.records import marked, records_of
from preference_cases import PreferenceCase, differences
from trainer_cases import make_models_and_data

pytestmark = [pytest.mark.distributed, pytest.mark.needs("trl"), pytest.mark.timeout(3600)]

TOLERANCE = 1e-5
"""Largest difference of a loss, a gradient norm or a logged value, over values above 1."""
_WORKER = Path(__file__).with_name("preference_cases.py")
_ENGINES = "zero2 ddp zero1 zero3 fsdp2"


def _cases(trainers: str, layouts: str, *options: str, **fields: Any) -> list[PreferenceCase]:
    return [
        PreferenceCase(trainer=trainer, layout=layout, options=options, accumulation=2, **fields)
        for trainer in trainers.split()
        for layout in layouts.split()
    ]


FIRST = [
    # Completions are sampled, with a reference that is sharded, and completions are given.
    *_cases("grpo", "zero3"),
    *_cases("grpo", "zero2", "fixed", "bnpo"),
    *_cases("rloo", "ddp", "fixed", "normalized"),
    *_cases("grpo", "fsdp2", "twice", "no_reference"),
    *_cases("gkd_on_policy", "zero2"),
    # Evaluated every step; seven rows fill no batches of two ranks.
    *_cases("dpo", "zero3", "evaluated"),
    *_cases("grpo", "zero2", "evaluated"),
    *_cases("kto", "tp"),
]
EQUAL = [
    *FIRST,
    *_cases("rloo dpo orpo cpo reward", "zero2", "evaluated"),
    # The rest of the table.
    *_cases("grpo rloo", _ENGINES),
    *_cases("grpo rloo", _ENGINES, "fixed"),
    *_cases("grpo rloo", "zero3 ddp", "adapter"),
    *_cases("grpo rloo", _ENGINES, "twice", "no_reference"),
    *_cases("grpo", "zero2", "fixed", "dr_grpo"),
    *_cases("grpo", "zero2", "fixed", "dapo"),
    *_cases("grpo", "zero2", "fixed", "cispo"),
    *_cases("grpo", "zero2", "fixed", "sequence", "grpo"),
    *_cases("grpo", "zero2", "fixed", "unscaled"),
    *_cases("grpo", _ENGINES, "longer", "bnpo"),
    *_cases("grpo", "zero1", "longer", "batch"),
    *_cases("dpo kto orpo cpo reward gkd gkd_on_policy", _ENGINES),
    *_cases("dpo", _ENGINES, "ipo"),
    *_cases("dpo", _ENGINES, "mixed"),
    *_cases("cpo", _ENGINES, "simpo"),
    *_cases("dpo kto orpo cpo gkd gkd_on_policy", "tp"),
    *_cases("dpo kto orpo cpo reward gkd", "ep", family="mixtral"),
]
SUMS = _cases("grpo", "single", "fixed", "dapo")[0]
"""A loss that does not depend on the order of completions within a step."""
REJECTED = {
    **dict.fromkeys(_cases("grpo rloo", "tp sp"), "overrides"),
    **dict.fromkeys(_cases("grpo rloo", "ep", family="mixtral"), "overrides"),
    **dict.fromkeys(_cases("grpo", "zero2", "raises"), "raised ZeroDivisionError on rank 1: no completion has"),
    **dict.fromkeys(_cases("rloo", "zero2", "short"), "returned 3 rewards for 4 completions on rank 1"),
    **dict.fromkeys(_cases("grpo", "zero2", "nan"), "returned nan for completion 3 of rank 1"),
    **dict.fromkeys(_cases("grpo", "zero2", "text"), "returned a str for completion 3 of rank 1"),
}
"""Rejected cases, and rewards that end the run on all ranks, with a fragment of the message."""


@pytest.fixture(scope="module")
def records(
    deepspeed_cpu_ops: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("preferences")
    parameters = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    cases = [each["case"] for each in parameters if isinstance(each.get("case"), PreferenceCase)]
    make_models_and_data(directory / "models", cases)
    references = [case.reference() for case in cases if case not in REJECTED]
    return records_of([replace(SUMS, stock=True), *references, *cases], directory, worker=_WORKER)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case in FIRST else [pytest.mark.full]) for case in dict.fromkeys(EQUAL)],
    ids=lambda case: case.name,
)
def test_tasks_log_what_one_process_logs(case: PreferenceCase, records: dict[str, dict[str, Any]]) -> None:
    record, reference = records[case.name], records[case.reference().name]
    assert "losses" in record and "losses" in reference, (record, reference)
    found = differences(record, reference)
    print(f"TABLE {case.name} {found}")
    assert record["completions"] == reference["completions"]
    assert max(found.values()) < TOLERANCE, found


@pytest.mark.parametrize("case", [SUMS])
def test_one_process_still_trains_what_trl_trains(case: PreferenceCase, records: dict[str, dict[str, Any]]) -> None:
    found = differences(records[case.name], records[replace(case, stock=True).name])
    assert max(found["losses"], found["grad_norms"]) < TOLERANCE, found


@pytest.mark.parametrize(
    "case", marked(REJECTED, lambda case: (REJECTED[case].split()[0],)), ids=lambda case: case.name
)
def test_unequal_tasks_and_wrong_rewards_end_every_rank(
    case: PreferenceCase, records: dict[str, dict[str, Any]]
) -> None:
    record = records[case.name]
    assert REJECTED[case] in record.get("refused", ""), record
    assert record["steps"] == 0
