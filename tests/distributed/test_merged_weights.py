"""The command that a rejected checkpoint's error names merges its weights, for a new run under another layout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from equivalence.records import records_of
from resume_cases import SAVED_AT, Resumed
from safetensors.torch import load_file
from shardwright.trainers.checkpoints import compared, new_run, saved_layout

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]
NOW = {"states": "all", "engine": "deepspeed", "zero_stage": 3, "sharded": "", "world_size": 2}


def merged(checkpoint: Path, now: dict[str, Any]) -> dict[str, Any]:
    """Run the command that the error of a checkpoint without complete weights names, and return the weights."""
    names = {file.relative_to(checkpoint).as_posix() for file in checkpoint.rglob("*")}
    errors, _ = compared(saved_layout(names), now, new_run=new_run(checkpoint, names))
    command = re.search(r"run `(.*?)` in (\S+) and start a new run", errors[0].fix)
    assert command and command[2] == str(checkpoint)
    environment = os.environ | {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    environment |= {"DS_ACCELERATOR": "cpu"}
    subprocess.run(command[1].split(), cwd=checkpoint, env=environment, check=True, capture_output=True, timeout=300)
    [file] = checkpoint.glob("model*.safetensors")
    return load_file(file)


def test_the_command_of_a_zero2_checkpoint_merges_its_weights_for_zero3(
    deepspeed_cpu_ops: None, tmp_path: Path
) -> None:
    case = Resumed(layout="zero2")
    record = records_of([case], tmp_path, Path(__file__).with_name("resume_cases.py"))[case.name]
    checkpoint = tmp_path / case.name / f"checkpoint-{SAVED_AT}"
    assert (checkpoint / "zero_to_fp32.py").is_file(), record
    trained = load_file(checkpoint / "model.safetensors")
    # As with `stage3_gather_16bit_weights_on_model_save: false`, or a state dict of DeepSpeed alone.
    (checkpoint / "model.safetensors").unlink()
    weights = merged(checkpoint, NOW)
    assert trained.keys() <= weights.keys()
    assert all(weights[name].equal(weight.float()) for name, weight in trained.items())


def test_the_command_of_an_fsdp2_checkpoint_merges_its_weights_for_zero3(tmp_path: Path) -> None:
    """Accelerate saves such shards with torch's distributed checkpoints."""
    import torch
    from torch.distributed import checkpoint as dcp

    trained = {"model.embed.weight": torch.arange(12.0).reshape(3, 4), "model.norm.weight": torch.ones(4)}
    checkpoint = tmp_path / "checkpoint-2"
    dcp.save({"model": dict(trained)}, checkpoint_id=checkpoint / "pytorch_model_fsdp_0", no_dist=True)
    for name in ("trainer_state.json", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"):
        (checkpoint / name).touch()
    shutil.copytree(checkpoint / "pytorch_model_fsdp_0", checkpoint / "optimizer_0")
    weights = merged(checkpoint, NOW)
    assert weights.keys() == trained.keys()
    assert all(weights[name].equal(weight) for name, weight in trained.items())
