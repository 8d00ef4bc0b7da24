"""A run that was killed while it saved goes on from the newest whole checkpoint, with unchanged losses."""

from __future__ import annotations

import json
import shutil

import pytest
from faults.broken_checkpoints import DAMAGES
from faults.injection import Fault
from faults.layouts import STEPS, Workshop, losses_of
from warm_ranks import RanksFailedError

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def workshop(deepspeed_cpu_ops: None, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("engine", ["ddp", "zero3", "fsdp2", "pipeline"])
def test_killed_before_the_record_it_resumes_from_the_one_before(engine, workshop, tmp_path):
    """All files of the checkpoint are there; without its record nobody knows that."""
    fault = Fault(kind="sigkill", phase="mark", step=4, rank=1)
    with pytest.raises(RanksFailedError, match="SIGKILL"):
        workshop.run(engine, tmp_path / "run", environment=fault.environment)
    assert (tmp_path / "run" / "checkpoint-4").exists()
    told = workshop.run(engine, tmp_path / "run", flags=("--resume",))
    assert "skipped: checkpoint-4 has no checkpoint_complete.json" in told
    assert "kept as incomplete-checkpoint-4" in told
    assert losses_of(tmp_path / "run") == pytest.approx(losses_of(workshop.whole(engine))[2:], abs=1e-6)
    assert len(losses_of(tmp_path / "run")) == STEPS - 2


def test_a_run_that_nobody_looks_after_begins_anew_where_no_checkpoint_is_whole(workshop, tmp_path):
    shutil.copytree(workshop.whole("ddp"), tmp_path / "run")
    for directory in (tmp_path / "run").glob("checkpoint-*"):
        DAMAGES["drop_record"](directory)
    told = workshop.run("ddp", tmp_path / "run", flags=("--resume-or-anew",))
    assert "no checkpoint is whole, training begins anew at step 0" in told
    assert f"kept as incomplete-checkpoint-{STEPS}" in told
    assert losses_of(tmp_path / "run") == pytest.approx(losses_of(workshop.whole("ddp")), abs=1e-6)


@pytest.mark.parametrize(
    ("engine", "damage"),
    [("ddp", "drop_scheduler"), ("zero2", "flip_optimizer")],
)
def test_a_damaged_checkpoint_is_skipped_for_a_whole_one(engine, damage, workshop, tmp_path):
    shutil.copytree(workshop.whole(engine), tmp_path / "run")
    DAMAGES[damage](tmp_path / "run" / f"checkpoint-{STEPS}")
    told = workshop.run(engine, tmp_path / "run", flags=("--resume",))
    assert f"skipped: checkpoint-{STEPS} " in told
    assert "resuming from checkpoint-4" in told
    assert losses_of(tmp_path / "run") == pytest.approx(losses_of(workshop.whole(engine))[4:], abs=1e-6)


def test_what_cannot_be_carried_over_is_refused_by_name(workshop, tmp_path):
    """Stage, engine, batch, seed and learning rate: all differences at once, before a state is loaded."""
    shutil.copytree(workshop.whole("zero2"), tmp_path / "run")
    changes = {"per_device_train_batch_size": 1, "seed": 6, "learning_rate": 1e-3}
    with pytest.raises(RanksFailedError) as refused:
        workshop.run("ddp", tmp_path / "run", flags=("--resume",), **changes)
    assert "failed with exit code 2" in str(refused.value)
    for fact in ("engine", "global_batch_size", "seed", "learning_rate"):
        assert f"resume: {fact} = " in refused.value.output
    assert "Traceback" not in refused.value.output


@pytest.mark.parametrize(
    ("engine", "before", "after"),
    [("ddp", 2, 1), ("fsdp2", 2, 1), ("zero1", 2, 1), ("zero2", 1, 2), ("zero3", 2, 4)],
)
def test_other_ranks_go_on_with_the_same_losses(engine, before, after, workshop, tmp_path):
    """ZeRO-3 with two groups of parameters, of which DeepSpeed gives the second the weight decay of the first."""
    whole = workshop.whole(engine, ranks=before)
    shutil.copytree(whole / "checkpoint-4", tmp_path / "run" / "checkpoint-4")
    told = workshop.run(engine, tmp_path / "run", ranks=after, flags=("--resume",), **workshop.batch(after))
    assert f"world_size was {before} and is now {after}" in told
    assert losses_of(tmp_path / "run") == pytest.approx(losses_of(whole)[4:], abs=1e-5)
    assert sorted(path.name for path in (tmp_path / "run").glob(".universal*")) == []


def test_a_run_that_is_done_takes_no_step_more(workshop, tmp_path):
    shutil.copytree(workshop.whole("ddp"), tmp_path / "run")
    with pytest.raises(RanksFailedError) as refused:
        workshop.run("ddp", tmp_path / "run", flags=("--resume",))
    assert f"all of {STEPS} steps are done" in refused.value.output


def test_the_limit_leaves_two_whole_checkpoints(workshop, tmp_path):
    workshop.run("ddp", tmp_path, save_total_limit=1)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]
    record = json.loads((tmp_path / "checkpoint-6" / "checkpoint_complete.json").read_text())
    assert record["facts"]["world_size"] == 2
    assert "optimizer.pt" in record["files"]
