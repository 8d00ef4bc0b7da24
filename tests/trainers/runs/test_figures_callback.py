"""Figures of a running training: two ranks of which one is slow, and what a progress line tells."""

from __future__ import annotations

import doctest
import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from shardwright.plugins.launching import messages
from shardwright.trainers.runs import figures_callback
from shardwright.trainers.runs.figures_callback import StepClock, StepFiguresCallback
from shardwright.trainers.runs.plan_callback import AcceleratorPeaks, PlanCallback
from warm_ranks import run_ranks

RANK = """
import json, os, sys, time
import torch
from transformers import Trainer, default_data_collator
from shardwright.plugins.accelerate.cpu_ranks import configure_cpu_ranks
from shardwright.plugins.transformers.training_arguments import training_arguments
from shardwright.trainers.runs.figures_callback import StepFiguresCallback
from small_models import llama

SLOW, SECONDS, STEPS = 1, 0.15, 4
settings = {"per_device_train_batch_size": 2, "max_steps": STEPS, "logging_steps": 2, "report_to": "none",
            "disable_tqdm": True, "output_dir": sys.argv[1], "save_strategy": "steps", "save_steps": 2}
arguments = training_arguments(settings, configure_cpu_ranks("ddp"))

def batch(samples):
    if int(os.environ["RANK"]) == SLOW:
        time.sleep(SECONDS)
    return default_data_collator(samples)

ids = torch.arange(8)
trainer = Trainer(model=llama(hidden_size=32, vocab_size=64), args=arguments, data_collator=batch,
                  train_dataset=[{"input_ids": ids, "labels": ids}] * 32)
StepFiguresCallback(tokens_of=lambda steps: 32 * steps).attach(trainer)
trainer.train()
assert not trainer.model._forward_hooks
if int(os.environ["RANK"]) == 0:
    print("LOGGED", json.dumps([entry for entry in trainer.state.log_history if "loss" in entry]))
"""


@pytest.mark.parametrize("module", [figures_callback, messages])
def test_examples(module) -> None:
    assert doctest.testmod(module).failed == 0


@pytest.mark.distributed
def test_a_slow_rank_is_found_by_work_without_communication(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    printed = run_ranks([tmp_path / "rank.py", tmp_path / "out"], ranks=2)
    line = next(line for line in printed.splitlines() if "LOGGED" in line)
    logged = json.loads(line.partition("LOGGED ")[2])
    assert [entry["step"] for entry in logged] == [2, 4]
    for entry in logged:
        assert entry["slowest_rank"] == 1 and 1.4 < entry["slowest_rank_ratio"] <= 2
        assert entry["step_seconds"] >= 0.1, "the sleep is part of a step of both"
        assert entry["tokens_per_second"] == pytest.approx(32 / entry["step_seconds"], rel=1e-3)
        assert "peak_allocated_gb" not in entry, "there is no accelerator"


def test_progress_messages_keep_their_figures() -> None:
    step = messages.Progress(what="step", done=3, total=4, figures=messages.Figures(loss=2.0, slowest_rank=1))
    line = json.dumps({"type": "shardwright.progress", **asdict(step)})
    assert messages.read_message(line) == step and str(step) == "step 3 of 4, loss 2.000"
    assert messages.read_message(line[:-9]) is None and messages.read_message("of a library") is None
    assert str(messages.Figures()) == ""


class Device:
    """An accelerator that runs behind the host, which waits for it only in `synchronize`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch

        self.recorded, self.passed, self.waits = 0, 0, 0
        device = self

        class Event:
            def __init__(self, **_: object) -> None:
                self.at = 0

            def record(self) -> None:
                device.recorded += 1
                self.at = device.recorded

            def query(self) -> bool:
                return self.at <= device.passed

            def elapsed_time(self, other: Event) -> float:
                assert other.query(), "an event that was not reached has no time"
                return 1e3 * (other.at - self.at)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        for name in ("is_available", "reset_peak_memory_stats", "max_memory_allocated", "max_memory_reserved"):
            monkeypatch.setattr(torch.cuda, name, lambda: 1)

    def synchronize(self) -> None:
        self.waits += 1
        self.passed = self.recorded


@pytest.mark.parametrize("kind", ["plan", "figures"])
def test_steps_are_timed_without_waiting_for_the_device(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    args, state, control = SimpleNamespace(), SimpleNamespace(global_step=0), SimpleNamespace(should_log=False)
    callback: Any = PlanCallback.__new__(PlanCallback) if kind == "plan" else StepFiguresCallback()
    model = SimpleNamespace(register_forward_hook=lambda hook: setattr(args, "ended_forward", hook))
    if kind == "plan":
        callback._meter = AcceleratorPeaks()
        callback._begin_training()
    else:
        callback.on_train_begin(args, state, control, model=model)
    for step in range(6):
        callback.on_step_begin(args, state, control)
        for _ in range(step):
            StepClock().start()
        if kind == "figures":
            args.ended_forward(), args.ended_forward()
        callback.on_step_end(args, state, control)
        device.passed = device.recorded - 3
    assert device.waits == 0
    seconds = callback._clock.read(waits=True)
    # The figures omit the first step.
    assert seconds == [1, 2, 3, 4, 5, 6][kind == "figures" :] and device.waits == 1
