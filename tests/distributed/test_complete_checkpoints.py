"""Runs that were killed while saving resume from the newest complete checkpoint, with unchanged losses."""

from __future__ import annotations

import json
import shutil

import pytest
from faults.injection import Fault
from faults.layouts import STEPS, Workshop, losses_of
from warm_ranks import RanksFailedError

pytestmark = [pytest.mark.distributed, pytest.mark.once]


@pytest.fixture(scope="module")
def workshop(deepspeed_cpu_ops: None, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("engine", ["zero3", pytest.param("pipeline", marks=pytest.mark.full)])
def test_run_killed_before_the_record_resumes_from_the_previous_checkpoint(engine, workshop, tmp_path):
    fault = Fault(kind="sigkill", phase="mark", step=4, rank=1)
    with pytest.raises(RanksFailedError, match="SIGKILL"):
        workshop.run(engine, tmp_path / "run", environment=fault.environment)
    assert (tmp_path / "run" / "checkpoint-4").exists()
    output = workshop.run(engine, tmp_path / "run", flags=("--resume",))
    assert "skipped: checkpoint-4 has no checkpoint_complete.json" in output
    assert "renamed to incomplete-checkpoint-4" in output
    assert losses_of(tmp_path / "run") == pytest.approx(losses_of(workshop.whole(engine))[2:], abs=1e-6)
    assert len(losses_of(tmp_path / "run")) == STEPS - 2


def test_resume_or_anew_starts_again_if_no_checkpoint_is_complete(workshop, tmp_path):
    shutil.copytree(workshop.whole("ddp"), tmp_path / "run")
    for directory in (tmp_path / "run").glob("checkpoint-*"):
        (directory / "checkpoint_complete.json").unlink()
    output = workshop.run("ddp", tmp_path / "run", flags=("--resume-or-anew",))
    assert "no checkpoint is complete, training starts again at step 0" in output
    assert f"renamed to incomplete-checkpoint-{STEPS}" in output
    assert losses_of(tmp_path / "run") == pytest.approx(losses_of(workshop.whole("ddp")), abs=1e-6)


def test_damaged_checkpoint_is_skipped(workshop, tmp_path):
    shutil.copytree(workshop.whole("ddp"), tmp_path / "run")
    file = tmp_path / "run" / f"checkpoint-{STEPS}" / "optimizer.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x40
    file.write_bytes(content)
    output = workshop.run("ddp", tmp_path / "run", flags=("--resume",))
    assert f"skipped: checkpoint-{STEPS} " in output
    assert "resuming from checkpoint-4" in output
    assert losses_of(tmp_path / "run") == pytest.approx(losses_of(workshop.whole("ddp"))[4:], abs=1e-6)


def test_all_differences_that_prevent_resuming_are_reported(workshop, tmp_path):
    shutil.copytree(workshop.whole("ddp"), tmp_path / "run")
    changes = {"per_device_train_batch_size": 1, "seed": 6, "learning_rate": 1e-3}
    with pytest.raises(RanksFailedError) as rejected:
        workshop.run("fsdp2", tmp_path / "run", flags=("--resume",), **changes)
    assert "failed with exit code 2" in str(rejected.value)
    for fact in ("engine", "global_batch_size", "seed", "learning_rate"):
        assert f"resume: {fact} = " in rejected.value.output
    assert "Traceback" not in rejected.value.output


@pytest.mark.parametrize(
    ("engine", "before", "after"),
    [
        ("zero3", 2, 4),
        ("fsdp2", 2, 1),
        *(pytest.param(*cell, marks=pytest.mark.full) for cell in (("ddp", 2, 1), ("zero2", 1, 2))),
    ],
)
def test_other_world_size_resumes_with_the_same_losses(engine, before, after, workshop, tmp_path):
    """ZeRO-3 has two parameter groups; DeepSpeed gives the second the weight decay of the first."""
    whole = workshop.whole(engine, ranks=before)
    shutil.copytree(whole / "checkpoint-4", tmp_path / "run" / "checkpoint-4")
    output = workshop.run(engine, tmp_path / "run", ranks=after, flags=("--resume",), **workshop.batch(after))
    assert f"world_size was {before} and is now {after}" in output
    assert losses_of(tmp_path / "run") == pytest.approx(losses_of(whole)[4:], abs=1e-5)
    assert sorted(path.name for path in (tmp_path / "run").glob(".universal*")) == []


@pytest.mark.parametrize(
    "engine", ["zero3", *(pytest.param(each, marks=pytest.mark.full) for each in ("fsdp2", "pipeline"))]
)
def test_run_killed_after_its_last_step_saves_its_model(engine, workshop, tmp_path):
    """It takes no further step, saves no other checkpoint, and writes the model of an uninterrupted run."""
    whole, run = workshop.whole(engine), tmp_path / "run"
    shutil.copytree(whole, run)
    for file in run.glob("*.safetensors"):
        file.unlink()
    checkpoints = sorted(run.glob("checkpoint-*/**/*"))
    output = workshop.run(engine, run, flags=("--resume",))
    assert f"all {STEPS} steps are done: only the rest of the command runs" in output
    assert weights_of(run) == weights_of(whole)
    assert losses_of(run) == [] and sorted(run.glob("checkpoint-*/**/*")) == checkpoints


def weights_of(directory):
    return {file.name: file.read_bytes() for file in directory.glob("*.safetensors")}


def test_save_total_limit_keeps_two_complete_checkpoints(workshop, tmp_path):
    workshop.run("ddp", tmp_path, save_total_limit=1)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]
    record = json.loads((tmp_path / "checkpoint-6" / "checkpoint_complete.json").read_text())
    assert record["facts"]["world_size"] == 2
    assert "optimizer.pt" in record["files"]
