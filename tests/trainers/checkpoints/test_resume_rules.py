"""Rules of resuming: what is refused says what to do, and what is converted goes on."""

from __future__ import annotations

import pytest
from shardwright.trainers.checkpoints.resume_rules import compared


def test_other_ranks_are_refused_where_states_fit_those_that_saved_them():
    saved = {"engine": "deepspeed", "axes": {"pipeline_stages": 2}, "world_size": 4}
    (fault,), remarks = compared(saved, saved | {"world_size": 2})
    assert (fault.where, fault.value, remarks) == ("resume: world_size", 2, [])
    assert fault.fix.startswith("launch 4 ranks, or start anew")


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "deepspeed"])
def test_other_ranks_go_on_where_states_are_whole_or_resharded(engine):
    faults, (remark,) = compared({"engine": engine, "world_size": 4}, {"engine": engine, "world_size": 2})
    assert not faults
    assert remark.startswith("resume: world_size was 4 and is now 2: random states")
