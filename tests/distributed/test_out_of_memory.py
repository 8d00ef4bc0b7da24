"""A run that runs out of memory ends with measured and planned memory, and with commands of plans that fit."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import shardwright
import torch
from commands import Result, shell_in
from planning import gallery_directory
from shardwright.ds_configs.plan.out_of_memory import OutOfMemory, next_plans, out_of_memory_text
from shardwright.trainers.runs.plan_callback import (
    LIMIT_VARIABLE,
    RunOutOfMemoryError,
    memory_errors,
    phase_of,
)
from small_models import llama
from training_runs import make_inputs
from transformers import Trainer, TrainingArguments

LIMIT = 3_000_000
"""Bytes of tensors: more than the weights and optimizer states of the model, less than a step with eight sequences."""
LAYOUT = (
    "--hardware 2xCPU --seq-len 32 --micro-batch-size 8 --global-batch-size 16 --strategy ddp --precision fp32 "
    "--gradient-checkpointing off"
)

pytestmark = pytest.mark.once
TRAIN = f"train llama {LAYOUT} --dataset rows.jsonl --max-steps 2 --evaluation-samples 4 --output-dir out"


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    make_inputs(tmp_path)

    def call(command: str, *arguments: object, limit: int | None = None) -> Result:
        own = shell_in(tmp_path, command, capsys, monkeypatch)
        if limit is not None:
            monkeypatch.setenv(LIMIT_VARIABLE, str(limit))
        return own(*arguments)

    return call


@pytest.mark.distributed
def test_train_reports_planned_memory_and_a_proposed_command_fits(shell: Any, tmp_path: Path) -> None:
    failed = shell(*shlex.split(TRAIN), limit=LIMIT)
    assert failed.code == 3
    text = "\n".join(failed.errors)
    assert re.match(r"rank [01]: out of memory in phase forward: tensors need [\d,]+ bytes", text)
    assert "measured peak of tensors: 3 MB of 3 MB" in text
    assert re.search(r"activations +[\d.]+ MB  largest term", text)
    commands = re.findall(r"    shardwright (train .*)", text)
    assert {"--micro-batch-size 1", "--gradient-checkpointing on", "--strategy fsdp2", "--offload cpu"} <= {
        option for command in commands for option in re.findall(r"--\S+ [^-\s]\S*", command)
    }
    smallest = next(command for command in commands if "ddp --micro-batch-size 1" in command)
    completed = shell(*shlex.split(smallest), limit=LIMIT)
    assert completed.code == 0, completed.err


@pytest.mark.full
@pytest.mark.distributed
def test_loading_and_own_scripts_are_reported_too(shell: Any, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import shardwright\n"
        "from transformers import AutoModelForCausalLM\n"
        "plan = shardwright.Plan.load('plan')\n"
        "model = AutoModelForCausalLM.from_pretrained('llama')\n"
        "rows = [{'input_ids': [1] * 32, 'labels': [1] * 32}] * 32\n"
        "args = plan.training_arguments('out', max_steps=2)\n"
        "shardwright.trainer_for(plan, model=model, args=args, train_dataset=rows).train()\n"
    )
    assert shell("plan", "llama", *shlex.split(LAYOUT), "--output-dir", "plan").code == 0
    for limit, phase in ((LIMIT, "forward|backward"), (100_000, "loading")):
        failed = shell("launch", "plan", "script.py", limit=limit)
        assert failed.code == 3, failed.err
        assert re.search(rf"rank [01]: out of memory in phase ({phase}): tensors need", failed.err)
        assert ("shardwright plan " in failed.err) == (phase != "loading"), "no plan needs so little"


def test_every_proposed_command_makes_the_plan_that_it_names(shell: Any) -> None:
    assert shell("plan", "llama", *shlex.split(LAYOUT), "--output-dir", "plan").code == 0
    plan = shardwright.Plan.load("plan")
    failure = OutOfMemory(phase="backward", error="out of memory", peak_bytes=LIMIT, limit_bytes=LIMIT)
    proposed = next_plans(plan, failure)
    commands = re.findall(r"    shardwright (plan .*)", out_of_memory_text(plan, failure))
    assert len(commands) == len(proposed) >= 4
    for command, expected in zip(commands, proposed, strict=True):
        assert shell(*shlex.split(command)).code == 0
        made = shardwright.Plan.load("plan").chosen
        assert made.layout == expected.evaluated.layout
        assert made.memory.gpu.allocated_bytes == expected.evaluated.memory.gpu.allocated_bytes <= LIMIT


@pytest.mark.parametrize("name", ["llama-3.1-8b_8xA100-80GB", "gpt2_2xT4", "qwen2.5-0.5b_1xRTX4090"])
def test_proposed_plans_keep_the_global_batch_and_need_less(name: str) -> None:
    plan = shardwright.Plan.load(gallery_directory(name))
    gpu, layout = plan.chosen.memory.gpu, plan.chosen.layout
    failure = OutOfMemory(phase="backward", error="out of memory", peak_bytes=gpu.capacity_bytes)
    proposed = next_plans(plan, failure)
    assert proposed
    batch = layout.micro_batch_size * layout.gradient_accumulation_steps * plan.hardware.world_size
    for found in proposed:
        assert found.job.global_batch_size == batch
        assert found.evaluated.memory.gpu.high_bytes < gpu.high_bytes
        assert found.evaluated.memory.gpu.allocated_bytes < gpu.allocated_bytes


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer step", "evaluation", "loading"])
def test_phase_is_where_the_allocation_failed(phase: str, tmp_path: Path) -> None:
    def fail(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    model = llama()
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 4
    arguments = TrainingArguments(str(tmp_path), max_steps=1, report_to=[], use_cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, optimizers=(optimizer, None))
    if phase in ("forward", "evaluation"):
        model.model.layers[0].register_forward_pre_hook(fail)
    elif phase == "backward":
        next(model.parameters()).register_hook(fail)
    elif phase == "optimizer step":
        optimizer.step = fail  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError) as raised:
        fail() if phase == "loading" else trainer.evaluate() if phase == "evaluation" else trainer.train()
    assert phase_of(raised.value.__traceback__) == phase


def test_other_errors_pass_unchanged() -> None:
    plan = shardwright.Plan.load(gallery_directory("gpt2_2xT4"))
    with pytest.raises(RuntimeError, match="a shape") as raised, memory_errors(plan):
        raise RuntimeError("a shape is wrong")
    assert not isinstance(raised.value, RunOutOfMemoryError)
    host = pytest.raises(RunOutOfMemoryError, match="planned host memory")
    with host, memory_errors(plan):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
