"""`shardwright train` as a user runs it on two CPU ranks: the losses of one process under every kind of layout."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from session import warm_command

pytestmark = pytest.mark.distributed

SETTINGS = {
    "seq-len": 32,
    "global_batch_size": 4,
    "evaluation_samples": 4,
    "logging_steps": 1,
    "learning_rate": 5e-3,
    "max_steps": 3,
    "gradient_checkpointing": "off",
    "optimizer": "adamw_torch",
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "zero1": {"strategy": "zero1"},
    "zero2": {"strategy": "zero2"},
    "zero3": {"strategy": "zero3"},
    "fsdp2": {"strategy": "fsdp2"},
    "sp": {"sequence_parallel_size": 2},
    "tp": {"tensor_parallel_size": 2},
    "pp": {"pipeline_parallel_size": 2},
    "ep": {"expert_parallel_size": 2},
    "lora": {"strategy": "zero2", "method": "lora", "lora_rank": 2},
    "qlora": {"strategy": "ddp", "method": "qlora", "lora_rank": 2},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from distilling import tiny

    root = tmp_path_factory.mktemp("train")
    sizes: dict[str, Any] = {"vocab_size": 300, "max_position_embeddings": 64}
    tiny("llama", hidden=64, **sizes).save_pretrained(root / "llama")
    tiny("mixtral", hidden=32, **sizes).save_pretrained(root / "mixtral")
    rows = [{"prompt": f"{n} and {n} is ", "completion": f"{2 * n}." * (1 + n % 4)} for n in range(40)]
    (root / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return {"root": root, "llama": root / "llama", "mixtral": root / "mixtral"}


def trained(
    model: Path, directory: Path, hardware: str, *flags: str, **settings: Any
) -> tuple[list[float], dict[str, Any]]:
    """Return the loss of each step, and what the command printed."""
    arguments = command(model, directory, hardware, *flags, **settings)
    done = subprocess.run(arguments, capture_output=True, text=True, cwd=directory, timeout=600)
    assert done.returncode == 0, done.stderr
    return losses_of(directory), json.loads(done.stdout)


def command(model: Path, directory: Path, hardware: str, *flags: str, **settings: Any) -> list[str]:
    """Return the arguments of a run in a directory, which is made."""
    stated = SETTINGS | settings | {"dataset": str(model.parent / "rows.jsonl"), "hardware": hardware}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "settings.yaml").write_text(json.dumps(stated))
    named = [*warm_command("shardwright"), "train", str(model), "--config", "settings.yaml", "--output-dir", "out"]
    return [*named, *flags, "--format", "json"]


def losses_of(directory: Path) -> list[float]:
    """Return the loss of each step that a run has written so far."""
    metrics = directory / "out" / "metrics.jsonl"
    return [json.loads(step)["loss"] for step in metrics.read_text().splitlines()] if metrics.exists() else []


@pytest.fixture(scope="module")
def one_process(models: dict[str, Path]) -> Any:
    """Return the losses of one process by model; each is trained when a test first asks for it."""
    found: dict[str, Any] = {}

    def of(name: str, method: str) -> Any:
        if (name, method) not in found:
            settings = {} if method == "full" else {"method": method, "lora_rank": 2}
            found[name, method] = trained(models[name], models["root"] / f"one-{name}-{method}", "1xCPU", **settings)
        return found[name, method]

    return of


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_those_of_one_process(
    models: dict[str, Path], one_process: Any, tmp_path: Path, layout: str, deepspeed_cpu_ops: None
) -> None:
    name = "mixtral" if layout == "ep" else "llama"
    settings = LAYOUTS[layout] | {"save_steps": 2}
    losses, shown = trained(models[name], tmp_path, "2xCPU", **settings)
    expected, alone = one_process(name, settings.get("method", "full"))
    assert losses == pytest.approx(expected, abs=1e-5)
    for when in ("before", "after"):
        assert shown["cross_entropy"][when] == pytest.approx(alone["cross_entropy"][when], abs=1e-5)
    assert losses[-1] < losses[0]
    assert list((tmp_path / "out").glob("*.safetensors"))
    # What a run leaves that ends behind its second step.
    resumed = tmp_path / "resumed"
    shutil.move(tmp_path / "out" / "checkpoints" / "checkpoint-2", resumed / "out" / "checkpoints" / "checkpoint-2")
    again, found = trained(models[name], resumed, "2xCPU", "--resume", **settings)
    assert again == losses
    assert found["cross_entropy"] == shown["cross_entropy"]


def test_a_run_that_is_asked_to_stop_loses_nothing(models: dict[str, Path], tmp_path: Path) -> None:
    """SIGTERM to the command alone, which starts the launcher, which starts the ranks."""
    settings: dict[str, Any] = {"strategy": "ddp", "max_steps": 60, "save_steps": 50}
    expected, shown = trained(models["llama"], tmp_path / "whole", "2xCPU", **settings)
    stopped = tmp_path / "stopped"
    arguments = command(models["llama"], stopped, "2xCPU", **settings)
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=stopped) as run:
        deadline = time.monotonic() + 60
        while not losses_of(stopped) and run.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        run.terminate()
        _, told = run.communicate(timeout=60)
    assert run.returncode == 143, told
    (record,) = stopped.glob("out/checkpoints/*/checkpoint_complete.json")
    done = int(record.parent.name.removeprefix("checkpoint-"))
    assert done < settings["save_steps"]
    again, found = trained(models["llama"], stopped, "2xCPU", "--resume", **settings)
    assert again == expected
    assert found["cross_entropy"] == shown["cross_entropy"]
