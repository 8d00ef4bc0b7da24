"""Guards in one process: signals, and checkpoints of steps that are not finite."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_settings import cpu_arguments
from shardwright.trainers import guards
from shardwright.trainers.guards import GuardCallback, NonFiniteError, StopRequest
from transformers import Trainer, TrainerControl, TrainerState


def in_a_child(work: Callable[[], object]) -> int:
    """Run work in a forked process and return its exit code, or minus its signal."""
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_signals_are_recorded_and_handlers_restored():
    before = signal.getsignal(signal.SIGTERM)
    request = StopRequest(0.3)
    request.install()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert request.number == signal.SIGTERM
        request.remove()
        request.install()
        assert request.number == 0, "another training got no signal"
    finally:
        request.remove()
    assert signal.getsignal(signal.SIGTERM) == before
    # `remove` has cancelled the time limit, so this process does not end.
    time.sleep(0.4)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_second_signal_ends_the_process_immediately(number, monkeypatch):
    monkeypatch.setattr(guards, "SAME_REQUEST_SECONDS", 0.0)

    def work() -> None:
        StopRequest(60.0).install()
        os.kill(os.getpid(), number)
        time.sleep(0.01)
        os.kill(os.getpid(), number)
        time.sleep(30)

    assert in_a_child(work) == 128 + number


def test_process_that_exceeds_the_time_limit_is_ended():
    def work() -> None:
        StopRequest(0.05).install()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)

    assert in_a_child(work) == 143


@pytest.mark.parametrize(("last", "epochs", "saved"), [(1.0, 2, 2), (torch.nan, 1, 0)])
def test_an_epoch_whose_last_step_is_not_finite_saves_no_checkpoint(
    last: float, epochs: int, saved: int, tmp_path: Path
) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, x: Any) -> Any:
            return {"loss": (self.weight * x).sum()}

    settings = {"save_strategy": "epoch", "num_train_epochs": epochs, "train_sampling_strategy": "sequential"}
    rows: Any = [{"x": torch.tensor([value])} for value in (1.0, 1.0, last)]
    trainer = Trainer(Model(), cpu_arguments(tmp_path, 1, optim="sgd", **settings), train_dataset=rows)
    GuardCallback().attach(trainer)
    trainer.train()
    assert len(list(tmp_path.glob("checkpoint-*"))) == saved


def test_the_norm_of_a_deepspeed_engine_is_read_where_no_step_reports_one(tmp_path: Path) -> None:
    """`PipelineTrainer` steps inside the engine, so that no norm is handed over."""
    engine = SimpleNamespace(get_global_grad_norm=lambda: torch.tensor(torch.inf))
    guard, model = GuardCallback(nonfinite_steps=1), torch.nn.Linear(1, 1)
    guard._trainer = SimpleNamespace(is_deepspeed_enabled=True, model_wrapped=engine)
    with pytest.raises(NonFiniteError, match="step 1: not finite: the norm of the gradients"):
        guard.on_pre_optimizer_step(cpu_arguments(tmp_path, 1), TrainerState(), TrainerControl(), model=model)
