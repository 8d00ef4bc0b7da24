"""`shardwright train` as a user runs it on two CPU ranks: the losses of one process under every kind of layout."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from shardwright.ds_configs.plan.measurement import FILE_NAME, measurement_from_text
from training_runs import LAYOUTS, command, losses_of, make_inputs, method_of, model_of, resumed, taken_away, trained

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("train")
    make_inputs(root)
    return root


@pytest.fixture(scope="module")
def one_process(inputs: Path) -> Any:
    found: dict[str, Any] = {}

    def of(layout: str) -> Any:
        name = f"one-{model_of(layout)}{method_of(layout)}".replace(" ", "")
        if name not in found:
            found[name] = trained(inputs, model_of(layout), inputs / name, f"--hardware 1xCPU {method_of(layout)}")
        return found[name]

    return of


RESUMED = ("zero3", "tp", "ep", "lora")
"""Layouts whose runs are also resumed; other tests resume the Trainer under every layout."""


# tests/equivalence compares every layout, below the command: these have a path of their own in it.
@pytest.mark.parametrize(
    "layout",
    [
        "zero3",
        "cp",
        "pp",
        *(pytest.param(layout, marks=pytest.mark.full) for layout in ("lora", "fsdp2", "sp", "tp", "ep", "qlora")),
    ],
)
def test_losses_are_those_of_one_process(
    inputs: Path, one_process: Any, tmp_path: Path, layout: str, deepspeed_cpu_ops: None
) -> None:
    run = inputs, model_of(layout), tmp_path, f"--hardware 2xCPU {LAYOUTS[layout]}"
    losses, shown = trained(*run, save_steps=2)
    expected, alone = one_process(layout)
    assert losses == pytest.approx(expected, abs=1e-5)
    for when in ("before", "after") if layout != "cp" else ():
        assert shown["cross_entropy"][when] == pytest.approx(alone["cross_entropy"][when], abs=1e-5)
    assert losses[-1] < losses[0] and shown["tokens"] == alone["tokens"]
    measured = measurement_from_text((tmp_path / "out" / FILE_NAME).read_bytes(), source="out")
    assert [rank.steps for rank in measured.measured] == [3, 3] and measured.differences == ()
    assert list((tmp_path / "out").glob("*.safetensors"))
    if layout in RESUMED:
        again, found = resumed(*run, save_steps=2)
        assert again == losses
        assert found["cross_entropy"] == shown["cross_entropy"]
    if layout == "zero3":
        check_finishing(run, losses, shown)


def check_finishing(run: tuple[Path, str, Path, str], losses: list[float], shown: dict[str, Any]) -> None:
    """What was killed between the last checkpoint and the report ends with the files of a run that was not."""
    *_, directory, flags = run
    out = directory / "out"
    names = {path.name for path in out.iterdir()}
    weights = taken_away(out)
    again, found = trained(*run[:3], f"{flags} --resume", save_steps=2)
    assert again == losses
    assert found["cross_entropy"] == shown["cross_entropy"] and found["tokens"] == shown["tokens"]
    assert found["tokens_per_second"] > 0
    assert {path.name for path in out.iterdir()} == names
    assert {file.name: file.read_bytes() for file in out.glob("*.safetensors")} == weights


def test_a_stopped_run_loses_no_steps(inputs: Path, tmp_path: Path) -> None:
    """SIGTERM to the command alone, which starts the launcher, which starts the ranks."""
    settings: dict[str, Any] = {"max_steps": 60, "save_steps": 50}
    flags = "--hardware 2xCPU --strategy ddp"
    expected, shown = trained(inputs, "llama", tmp_path / "whole", flags, **settings)
    stopped = tmp_path / "stopped"
    arguments = command(inputs, "llama", stopped, flags, **settings)
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=stopped) as run:
        deadline = time.monotonic() + 60
        while not losses_of(stopped) and run.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        run.terminate()
        _, reported = run.communicate(timeout=60)
    assert run.returncode == 143, reported
    (record,) = stopped.glob("out/checkpoints/*/checkpoint_complete.json")
    done = int(record.parent.name.removeprefix("checkpoint-"))
    assert done < settings["save_steps"]
    assert f"note: stopped: checkpoint-{done} is complete; resume with the same command and --resume" in reported
    again, found = trained(inputs, "llama", stopped, f"{flags} --resume", **settings)
    assert again == expected
    assert found["cross_entropy"] == shown["cross_entropy"]
