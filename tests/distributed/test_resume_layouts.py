"""A checkpoint of another layout resumes with the figures of the run that saved it, or is rejected before it loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from equivalence.records import records_of
from resume_cases import Resumed

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(3600)]

EXCHANGED = [
    *(("zero2", "zero1"), ("zero1", "sp2-zero1"), ("fsdp2", "fsdp2-offload"), ("ddp", "one-process")),
    # DeepSpeed's CPU Adam has settings that torch's AdamW does not save.
    *(("zero2", "zero2-offload"), ("zero3", "zero3-offload-param"), ("zero3-offload-param", "zero3")),
    # Another number of ranks.
    *(("one-process", "ddp"), ("zero2", "one-rank-zero2"), ("one-rank-zero2", "zero1")),
]
REJECTED = [
    *(("zero3", "zero2"), ("zero2", "zero3"), ("zero0", "zero1"), ("zero1", "zero0"), ("fsdp2", "zero3")),
    *(("zero3", "fsdp2"), ("ddp", "zero2"), ("ddp", "fsdp2"), ("fsdp2", "one-process"), ("zero1", "tp2-zero1")),
    *(("tp2-zero1", "zero1"), ("pp2-zero0", "zero0")),
    # Upstream resumes these without a word, and with a new optimizer.
    *(("zero0", "ddp"), ("zero2", "one-process")),
]
WEIGHTS_ALONE = ("ddp", "zero1", "zero3", "fsdp2")
RESUMING = [
    *(Resumed(layout=layout, saved=saved) for saved, layout in (*EXCHANGED, *REJECTED)),
    *(Resumed(layout=layout, saved=f"{layout}-only-model") for layout in WEIGHTS_ALONE),
    *(Resumed(layout=layout, saved=f"{layout}-adapters") for layout in ("ddp", "zero2")),
]
SAVING = [
    *(Resumed(layout=layout) for layout in dict.fromkeys(saved for saved, _ in (*EXCHANGED, *REJECTED))),
    *(Resumed(layout=layout, only_model=True) for layout in WEIGHTS_ALONE),
    *(Resumed(layout=layout, adapters=True) for layout in ("ddp", "zero2")),
]


@pytest.fixture(scope="module")
def records(deepspeed_cpu_ops: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    directory, worker = tmp_path_factory.mktemp("resumed"), Path(__file__).with_name("resume_cases.py")
    return records_of(SAVING, directory, worker) | records_of(RESUMING, directory, worker)


@pytest.mark.parametrize(("saved", "layout"), EXCHANGED)
def test_layouts_with_the_same_states_resume_with_the_same_losses(
    saved: str, layout: str, records: dict[str, dict[str, Any]]
) -> None:
    record = records[Resumed(layout=layout, saved=saved).name]
    assert record.get("losses") == pytest.approx(records[saved]["losses"], abs=1e-5), record


@pytest.mark.parametrize("case", RESUMING[len(EXCHANGED) :], ids=lambda case: case.name)
def test_other_layouts_and_weights_alone_are_rejected(case: Resumed, records: dict[str, dict[str, Any]]) -> None:
    record = records[case.name]
    assert "resume: " in record.get("refused", ""), record
    assert record["steps"] == 0 and "new run" in record["refused"]
