"""The clock of a training: figures of two ranks, and steps that are timed without waiting."""

from __future__ import annotations

import doctest
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from planning import llama
from shardwright.ds_configs.plan.plan import Plan, make_plan
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.plugins.launching import messages
from shardwright.trainers.runs import clock
from shardwright.trainers.runs.clock import LATER_STEPS, StepClock, point
from warm_ranks import run_ranks

RANK = """
import json, os, sys, time
import torch
from transformers import Trainer, default_data_collator
from shardwright.plugins.accelerate import configure_cpu_ranks
from shardwright.plugins.transformers.training_arguments import training_arguments
from shardwright.ds_configs.plan.plan import Plan
from shardwright.trainers.runs.clock import StepClock
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
StepClock(Plan.load(sys.argv[2]), tokens_of=lambda steps: 32 * steps).follow(trainer)
trainer.train()
if int(os.environ["RANK"]) == 0:
    print("LOGGED", json.dumps([entry for entry in trainer.state.log_history if "loss" in entry]))
"""


def plan() -> Plan:
    return make_plan(
        llama(hidden_size=64, intermediate_size=128), parse_hardware("1xCPU"), TrainingJob(seq_len_tokens=8)
    )


@pytest.mark.parametrize("module", [clock, messages])
def test_examples(module) -> None:
    assert doctest.testmod(module).failed == 0


@pytest.mark.distributed
def test_the_step_time_is_that_of_the_slowest_rank(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    plan().write(tmp_path / "plan")
    printed = run_ranks([tmp_path / "rank.py", tmp_path / "out", tmp_path / "plan"], ranks=2)
    line = next(line for line in printed.splitlines() if "LOGGED" in line)
    logged = json.loads(line.partition("LOGGED ")[2])
    assert [entry["step"] for entry in logged] == [2, 4]
    for entry in logged:
        assert entry["step_seconds"] >= 0.1, "the sleep is part of a step of both"
        assert entry["tokens_per_second"] == pytest.approx(32 / entry["step_seconds"], rel=1e-3)
        assert "peak_allocated_gb" not in entry, "there is no accelerator"


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


def test_steps_are_timed_without_waiting_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    clock, state = StepClock(plan()), SimpleNamespace(global_step=0)
    control = SimpleNamespace(should_log=False)
    clock.on_train_begin(None, state, control)
    for step in range(6):
        clock.on_step_begin(None, state, control)
        for _ in range(step):
            point()
        state.global_step += 1
        clock.on_step_end(None, state, control)
        device.passed = device.recorded - 3
    assert device.waits == 0
    assert clock.steps.read(waits=True) == [1, 2, 3, 4, 5, 6] and device.waits == 1


def test_peaks_cover_the_first_step_and_tell_the_later_ones_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    Device(monkeypatch)
    statistics = {"allocated": 900, "reserved": 1000}
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: statistics.update(allocated=100, reserved=300))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: statistics["allocated"])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: statistics["reserved"])
    clock, state, control = StepClock(plan()), SimpleNamespace(global_step=0), SimpleNamespace(should_log=False)
    assert clock.peak_bytes() == 100, "what was allocated before does not count"
    clock.on_step_begin(None, state, control)
    statistics.update(allocated=500, reserved=700)
    clock.on_step_end(None, state, control)
    statistics.update(allocated=400, reserved=650)
    assert clock.meter is not None
    reading = clock.meter.reading()
    assert (clock.peak_bytes(), reading.reserved_peak_bytes, reading.peaks[LATER_STEPS]) == (500, 700, 400)
