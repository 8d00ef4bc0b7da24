"""Checks of resumed runs that are left to the ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from planning import public_model
from shardwright.ds_configs.plan.plan import make_plan
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.trainers.checkpoints.record import flushed_records, planned_facts, write_record
from shardwright.trainers.runs.inputs import check_resumption

FACTS = {"engine": "ddp", "max_steps": 6}


def saved(directory: Path, step: int) -> Path:
    """Return the state's file of a complete checkpoint of a run of six steps."""
    file = directory / f"checkpoint-{step}" / "trainer_state.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"max_steps": 6}))
    write_record(file.parent, step=step, files=flushed_records(file.parent), facts=FACTS)
    return file


def test_a_damaged_checkpoint_is_no_reason(tmp_path: Path) -> None:
    """Its file has its size and holds zeros, as after a loss of power; the ranks go on from the one before."""
    saved(tmp_path, 4)
    file = saved(tmp_path, 6)
    file.write_bytes(bytes(file.stat().st_size))
    check_resumption(tmp_path, FACTS, steps=6)


@pytest.mark.parametrize(
    ("strategy", "offload", "axes"),
    [("zero3", "none", {}), ("fsdp2", "none", {}), ("fsdp2-hybrid", "none", None), ("fsdp2-hybrid", "cpu", None)],
)
def test_axes_that_only_ranks_can_name_are_left_to_them(
    strategy: str, offload: str, axes: dict[str, int] | None
) -> None:
    job = TrainingJob(strategy=strategy, offload=offload, seq_len_tokens=512)
    made = make_plan(public_model("meta-llama/Llama-3.1-8B"), parse_hardware("2x8xA100-80GB"), job)
    assert made.chosen.layout.engine == strategy.partition("-")[0].replace("zero3", "deepspeed")
    assert planned_facts(made, {"per_device_train_batch_size": 1}, None).get("axes") == axes


@pytest.mark.parametrize(("axis", "stated"), [("tensor_parallel_size", False), (None, True)])
def test_the_batch_of_a_layout_with_axes_is_left_to_the_ranks(axis: str | None, stated: bool) -> None:
    """Ranks that share a layer read the same samples, so the Trainer counts another global batch than the plan."""
    job = TrainingJob(strategy="zero1", seq_len_tokens=512, **({axis: 2} if axis else {}))
    made = make_plan(public_model("meta-llama/Llama-3.2-1B"), parse_hardware("8xA100-80GB"), job)
    assert ("global_batch_size" in planned_facts(made, {"per_device_train_batch_size": 1}, None)) is stated
