"""Checks of resumed runs that are left to the ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from planning import public_model
from shardwright.ds_configs.plan.plan import make_plan
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.trainers.checkpoints import flushed_records, planned_facts, write_record
from shardwright.trainers.runs.inputs import check_resumption
from shardwright.trainers.runs.ranks import trained_tokens

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


@pytest.mark.parametrize(("step", "steps", "outcome"), [(6, 6, "done"), (4, 6, ""), (6, 8, ""), (4, 5, "")])
def test_only_a_run_without_further_steps_is_complete(step: int, steps: int, outcome: str, tmp_path: Path) -> None:
    saved(tmp_path, step)
    finished = check_resumption(tmp_path, FACTS | {"max_steps": steps}, steps=steps)
    assert (finished is not None) == (outcome == "done")


@pytest.mark.parametrize(("steps", "tokens"), [(0, 0), (2, 1600), (3, 2000), (4, 2800), (6, 4000)])
def test_the_last_step_of_an_epoch_has_the_remaining_tokens(steps: int, tokens: int) -> None:
    assert trained_tokens(8, steps, samples=20, tokens=2000) == tokens


@pytest.mark.parametrize("step", [4, 6])
def test_a_run_with_fewer_steps_than_the_checkpoint_is_rejected(step: int, tmp_path: Path) -> None:
    """The rates of its checkpoint belong to the schedule of the longer run."""
    saved(tmp_path, step)
    with pytest.raises(UsageError, match=r"all 4 steps are done, in a run of 6 steps"):
        check_resumption(tmp_path, FACTS | {"max_steps": 4}, steps=4)


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


@pytest.mark.parametrize(("task", "is_known"), [("sft", True), ("dpo", False)])
def test_rows_that_a_task_tokenizes_are_left_to_the_ranks(task: Any, is_known: bool) -> None:
    job = TrainingJob(task=task, seq_len_tokens=512)
    made = make_plan(public_model("meta-llama/Llama-3.2-1B"), parse_hardware("8xA100-80GB"), job)
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}]
    assert ("data" in planned_facts(made, {"per_device_train_batch_size": 1}, rows)) is is_known
