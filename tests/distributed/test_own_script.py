"""`shardwright launch`: scripts that know nothing of Shardwright, under plans whose directory has moved."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import shardwright
from session import warm_command
from shardwright.ds_configs.specs.job import TrainingJob

pytestmark = pytest.mark.distributed

EXAMPLES = Path(__file__).parents[2] / "examples"


def launched(plan: Path, script: str, *arguments: object, cwd: Path) -> str:
    command = [*warm_command("shardwright"), "launch", str(plan), str(EXAMPLES / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_trainer_script_loses_the_same_under_plans_that_moved(
    tiny_llama: Path, deepspeed_cpu_ops: None, tmp_path: Path
) -> None:
    losses = []
    strategies: tuple[Any, ...] = ("ddp", "zero3", "fsdp2")
    for strategy in strategies:
        job = TrainingJob(seq_len_tokens=32, micro_batch_size=2, precision="fp32", strategy=strategy)
        written, moved = tmp_path / f"written-{strategy}", tmp_path / "moved" / strategy
        shardwright.plan(str(tiny_llama), "2xCPU", job).write(written)
        moved.parent.mkdir(exist_ok=True)
        written.rename(moved)
        shown = launched(moved, "own_trainer.py", tiny_llama, moved / "training_arguments.json", cwd=moved.parent)
        assert "trained on 2 ranks" in shown
        losses.append(float(re.findall(r"ranks, loss (\S+)", shown)[0]))
    assert losses[1:] == pytest.approx([losses[0]] * 2, abs=1e-5)


def test_a_loop_with_accelerate(tiny_llama: Path, tmp_path: Path) -> None:
    job = TrainingJob(seq_len_tokens=32, micro_batch_size=2, precision="fp32", strategy="ddp")
    shardwright.plan(str(tiny_llama), "2xCPU", job).write(tmp_path / "plan")
    shown = launched(tmp_path / "plan", "own_accelerate_loop.py", tiny_llama, cwd=tmp_path)
    assert "trained on 2 ranks" in shown
    first, *_, last = map(float, re.findall(r"^loss (\S+)", shown, re.MULTILINE))
    assert last < first
