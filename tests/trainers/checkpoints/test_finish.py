"""Saving while training continues: steps run before the record exists, and no failure is lost."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from shardwright.ds_configs.specs.errors import ShardwrightError
from shardwright.trainers import checkpoint_callback as module
from shardwright.trainers.checkpoint_callback import CheckpointCallback
from shardwright.trainers.checkpoints import RECORD, read_whole


class Run:
    def __init__(self, output_dir: Path) -> None:
        self.args = SimpleNamespace(output_dir=str(output_dir), local_process_index=0, should_save=True, device="cpu")
        self.control = SimpleNamespace(should_save=False, should_training_stop=False)
        self.callback = CheckpointCallback()
        self.callback._facts = {"engine": "ddp"}

    def save(self, step: int) -> Path:
        directory = Path(self.args.output_dir) / f"checkpoint-{step}"
        directory.mkdir(parents=True)
        (directory / "model.safetensors").write_bytes(b"w" * 1000)
        self.state = SimpleNamespace(global_step=step, best_model_checkpoint=None)
        self.callback.on_save(self.args, self.state, self.control)
        return directory

    def step(self, **control: bool) -> None:
        vars(self.control).update(control)
        self.callback.on_step_end(self.args, self.state, self.control)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Blocks the flushing of files until it is set."""
    opened = threading.Event()
    flush = module.flushed_records

    def held(directory: Path) -> Any:
        assert opened.wait(30)
        return flush(directory)

    monkeypatch.setattr(module, "flushed_records", held)
    return opened


def test_steps_continue_before_the_record_is_written(tmp_path, gate):
    run = Run(tmp_path)
    directory = run.save(2)
    run.state.global_step += 1
    run.step()
    assert not (directory / RECORD).exists()
    gate.set()
    run.step(should_save=True)
    assert read_whole(directory).step == 2


def test_failed_save_ends_the_run_at_the_next_step(tmp_path, monkeypatch):
    def fail(directory: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "flushed_records", fail)
    run = Run(tmp_path)
    directory = run.save(2)
    with pytest.raises(ShardwrightError, match=r"checkpoint-2 could not be finished: .*No space left"):
        run.step(should_training_stop=True)
    assert not (directory / RECORD).exists()


def test_exception_in_training_waits_for_the_record(tmp_path, gate):
    run = Run(tmp_path)
    with pytest.raises(RuntimeError, match="a step failed"), run.callback.around_training():
        run.save(2)
        threading.Timer(0.05, gate.set).start()
        raise RuntimeError("a step failed")
    assert read_whole(tmp_path / "checkpoint-2").step == 2


def test_checkpoint_is_marked_complete_after_all_nodes(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "gathered", lambda mine: [True, False, True, False])
    run = Run(tmp_path)
    directory = run.save(2)
    assert run.callback._finish.ended(30)
    assert not (directory / RECORD).exists()
    run.step()
    assert read_whole(directory).step == 2
