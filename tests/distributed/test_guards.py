"""A run stops on non-finite numbers, on a signal to any rank, and when a rank hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from faults.injection import Fault
from faults.layouts import STEPS, Workshop, losses_of
from shardwright.ds_configs.check.flight_recorder import summary
from warm_ranks import OnDemand, RanksFailedError

pytestmark = [pytest.mark.distributed, pytest.mark.once]


@pytest.fixture(scope="module")
def workshop(deepspeed_cpu_ops: None, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("guards"))


@pytest.fixture(scope="module")
def whole(workshop: Workshop) -> dict[str, list[float]]:
    def run(engine: str) -> list[float]:
        workshop.run(engine, workshop.directory / engine)
        return losses_of(workshop.directory / engine)

    return OnDemand(run)


def failed(workshop: Workshop, engine: str, output: Path, fault: Fault, *flags: str, **names: str) -> tuple[str, str]:
    """Return the error of a failed run and its output."""
    with pytest.raises(RanksFailedError) as error:
        workshop.run(engine, output, environment={**fault.environment, **names}, flags=flags)
    return str(error.value).splitlines()[0], error.value.output


@pytest.mark.parametrize(
    "engine", ["zero3", *(pytest.param(each, marks=pytest.mark.full) for each in ("fsdp2", "pipeline"))]
)
def test_three_nan_steps_exit_with_4_and_save_no_model(engine, workshop, tmp_path):
    # A pipeline stage computes no loss that could be made NaN.
    kind = "nan-weight" if engine == "pipeline" else "nan-loss"
    error, output = failed(workshop, engine, tmp_path, Fault(kind=kind, phase="step", step=3, rank=1))
    assert "failed with exit code 4" in error
    assert "3 consecutive steps were not finite; the first: step 3: not finite: the loss on rank" in output
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2"]
    assert not list(tmp_path.glob("*.safetensors"))


def test_infinite_gradient_ends_a_run_before_nan_is_saved(workshop, tmp_path):
    error, output = failed(workshop, "ddp", tmp_path, Fault(kind="inf-gradient", phase="step", step=3))
    assert "failed with exit code 4" in error
    assert "step 3: not finite: gradients or weights of model.embed_tokens.weight on rank 0, 1" in output


def test_nonfinite_last_step_saves_no_model(workshop, tmp_path):
    """The number of consecutive steps does not end the run; the check of the weights does."""
    error, output = failed(workshop, "ddp", tmp_path, Fault(kind="inf-gradient", phase="step", step=STEPS))
    assert "failed with exit code 4" in error
    assert "the trained model: holds NaN or infinity in" in output
    assert not list(tmp_path.glob("*.safetensors"))
    fault = Fault(kind="inf-gradient", phase="step", step=STEPS)
    workshop.run("ddp", tmp_path / "allowed", environment=fault.environment, flags=("--allow-nonfinite",))
    assert list((tmp_path / "allowed").glob("*.safetensors"))


def test_nonfinite_weight_of_one_rank_is_in_no_checkpoint(workshop, tmp_path):
    error, output = failed(workshop, "ddp", tmp_path, Fault(kind="nan-weight", phase="step", step=2, rank=1))
    assert "failed with exit code 4" in error
    assert "checkpoint-2: holds NaN or infinity in model.embed_tokens.weight (rank 1)" in output
    assert not list(tmp_path.glob("checkpoint-*"))


@pytest.mark.parametrize(
    ("engine", "kind", "code"),
    [
        ("zero3", "sigterm", 143),
        ("ddp", "sigint", 130),
        pytest.param("pipeline", "sigterm", 143, marks=pytest.mark.full),
    ],
)
def test_signal_to_one_rank_saves_on_all_ranks(engine, kind, code, workshop, whole, tmp_path):
    error, output = failed(workshop, engine, tmp_path, Fault(kind=kind, phase="step", step=3, rank=1))
    assert f"failed with exit code {code}" in error
    assert f"stopped by {kind.upper()} after step 3 of {STEPS}: saved as checkpoint-3" in output
    workshop.run(engine, tmp_path, flags=("--resume",))
    assert losses_of(tmp_path) == pytest.approx(whole[engine][3:], abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "phase", "since", "function"),
    [
        ("hang", "step", "the beginning of step 3", "training_step"),
        pytest.param("sigstop", "step", "the beginning of step 3", "training_step", marks=pytest.mark.full),
        ("hang", "load", "its start", "make_trainer"),
    ],
)
def test_hanging_rank_ends_all_ranks_with_stacks(kind, phase, since, function, workshop, tmp_path):
    fault = Fault(kind=kind, phase=phase, step=3, rank=1)
    traces = {"TORCH_FR_DUMP_TEMP_FILE": str(tmp_path.with_name("rank_"))}
    error, output = failed(workshop, "ddp", tmp_path, fault, "--hang-timeout", "4", **traces)
    assert "failed with exit code 1" in error
    assert f"rank 0 made no progress for 4 s, since {since}" in output
    assert function in output
    if kind == "hang":
        assert "rank 1 made no progress for 4 s" in output
        assert "in happen" in output
    if (kind, phase) == ("hang", "step"):
        lines = "\n".join(summary(tmp_path.with_name("rank_")))
        assert "rank 0 waited in gloo:" in lines and "rank 1 lags: its last operation was gloo:" in lines


def test_ranks_end_when_their_launcher_is_killed(cold, tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(
        "import pathlib, sys, time, os\n"
        "from shardwright.plugins.launching.elastic import recorded\n"
        "def stay():\n"
        "    pathlib.Path(sys.argv[1], os.environ['RANK']).write_text(str(os.getpid()))\n"
        "    time.sleep(120)\n"
        "recorded(stay)()\n"
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    (tmp_path / "ranks").mkdir()
    process = subprocess.Popen([*launcher, str(script), str(tmp_path / "ranks")], start_new_session=True)
    try:
        deadline = time.monotonic() + 90
        while len(list((tmp_path / "ranks").iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        ranks = [psutil.Process(int(path.read_text())) for path in (tmp_path / "ranks").iterdir()]
        assert len(ranks) == 2
        process.kill()
        assert not psutil.wait_procs(ranks, timeout=10)[1]
    finally:
        process.kill()
        process.wait()
        for child in psutil.process_iter(["cmdline"]):
            if str(script) in (child.info["cmdline"] or []):
                os.kill(child.pid, signal.SIGKILL)
