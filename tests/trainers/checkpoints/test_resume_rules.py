"""Rules of resuming: rejected differences name a fix, and converted ones continue."""

from __future__ import annotations

import pytest
from shardwright.trainers.checkpoints.resume import compared


def test_other_world_size_is_rejected_if_states_are_sharded_by_axes():
    saved = {"engine": "deepspeed", "axes": {"pipeline_stages": 2}, "world_size": 4}
    (error,), warnings = compared(saved, saved | {"world_size": 2})
    assert (error.where, error.value, warnings) == ("resume: world_size", 2, [])
    assert error.fix.startswith("launch 4 ranks, or start a new run")


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "deepspeed"])
def test_other_world_size_continues_if_states_are_complete_or_resharded(engine):
    errors, (warning,) = compared({"engine": engine, "world_size": 4}, {"engine": engine, "world_size": 2})
    assert not errors
    assert warning.startswith("resume: world_size was 4 and is now 2: the random states of the ranks")
