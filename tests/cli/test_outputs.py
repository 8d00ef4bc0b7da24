"""Every command that writes results rejects its own sources, an unwritable disk and a second run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from commands import Shell, shell_in
from shardwright.ds_configs.plan.output import reserved
from small_models import llama

DATA = ("--dataset", "text.txt", "--seq-len", "32")
TRAINING = (*DATA, "--hardware", "2xCPU", "--max-steps", "1", "--evaluation-samples", "2")
COMMANDS = {
    "train": ("train", "model", *TRAINING),
    "distill": ("distill", "model", "student", *TRAINING),
    "qat": ("qat", "model", "--scheme", "W4A16", "--group-size", "32", *TRAINING),
    "cache-teacher": ("cache-teacher", "model", *DATA),
    "student": ("student", "model", "--layers", "1"),
    "quantize": ("quantize", "model", "--scheme", "NF4", "--force"),
    "evaluate": ("evaluate", "model", "--dataset", "text.txt", "--seq-len", "32", "--force"),
    "rehearse": ("rehearse", "plan", "--steps", "4", "--force"),
    "tune": ("tune", "plan", "--trials", "1", "--force"),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from shardwright.ds_configs.specs.job import TrainingJob
    from shardwright.plugins.planning.from_names import plan

    root = tmp_path_factory.mktemp("outputs")
    for name in ("model", "student"):
        llama(hidden_size=32, vocab_size=260).save_pretrained(root / name)
    (root / "text.txt").write_text(" ".join(f"{number} squared is {number * number}." for number in range(300)))
    (root / "link").symlink_to(root / "model")
    plan(str(root / "model"), "2xCPU", TrainingJob(seq_len_tokens=32, precision="fp32")).write(root / "plan")
    return root


@pytest.fixture
def run(directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    def no_weights(*_: object, **__: object) -> None:
        raise AssertionError("the work began")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", no_weights)
    monkeypatch.setattr("shardwright.plugins.safetensors.reading.safe_open", no_weights, raising=False)
    monkeypatch.setattr("shardwright.trainers.runs.launch.launch_ranks", no_weights)

    def call(name: str, output: object) -> tuple[int, str]:
        arguments = [*COMMANDS[name], "--output-dir", str(output)]
        done = shell_in(directory, arguments[0], capsys, monkeypatch)(*arguments[1:])
        return done.code, done.err

    return call


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("output", ["model", "link", "link/inside", "/proc/nowhere/out"])
def test_an_unwritable_directory_is_rejected_before_the_work(name: str, output: str, run: Shell) -> None:
    code, reported = run(name, output)
    assert code == 2 and "Traceback" not in reported
    part = "the teacher" if name in ("distill", "cache-teacher", "student") else "the model"
    rules = {"link/inside": f"is inside {part}", "/proc/nowhere/out": "cannot be written ("}
    assert rules.get(output, f"is {part} itself") in reported


@pytest.mark.parametrize("name", COMMANDS)
def test_a_second_run_into_a_directory_is_rejected(name: str, directory: Path, run: Shell) -> None:
    with reserved(directory / "out", force=False):
        code, reported = run(name, "out")
    assert code == 2
    assert f"process {os.getpid()} is writing to it; wait until it ends" in reported
    assert not (directory / "out").exists()
