"""Runs of `shardwright train`: one command for each kind of layout, and the data and models that they name."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from session import warm_command

SETTINGS = {
    "seq-len": 32,
    "global_batch_size": 4,
    "evaluation_samples": 4,
    "logging_steps": 1,
    "learning_rate": 5e-3,
    "max_steps": 3,
    "gradient_checkpointing": "off",
    "optimizer": "adamw_torch",
    "packing": "off",
}
LAYOUTS = {
    "ddp": "--strategy ddp",
    "zero1": "--strategy zero1",
    "zero2": "--strategy zero2",
    "zero3": "--strategy zero3",
    "fsdp2": "--strategy fsdp2",
    "sp": "--sequence-parallel-size 2",
    "cp": "--context-parallel-size 2",
    "tp": "--tensor-parallel-size 2",
    "pp": "--pipeline-parallel-size 2",
    "ep": "--expert-parallel-size 2",
    "lora": "--strategy zero2 --method lora --lora-rank 2",
    "qlora": "--strategy ddp --method qlora --lora-rank 2",
}
"""Flags that ask for each."""


Losses = list[float]


def method_of(layout: str) -> str:
    """Return the flags with which one process trains what a layout divides."""
    return LAYOUTS[layout].partition("--method")[1] + LAYOUTS[layout].partition("--method")[2]


def model_of(layout: str) -> str:
    """Return the name of the model that a layout is tried with: experts need a mixture of them."""
    return "mixtral" if layout == "ep" else "llama"


def make_inputs(root: Path) -> None:
    from distilling import tiny

    sizes: dict[str, Any] = {"vocab_size": 300, "max_position_embeddings": 64}
    tiny("llama", hidden=64, **sizes).save_pretrained(root / "llama")
    tiny("mixtral", hidden=32, **sizes).save_pretrained(root / "mixtral")
    rows = [{"prompt": f"{n} and {n} is ", "completion": f"{2 * n}." * (1 + n % 4)} for n in range(40)]
    (root / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def command(root: Path, model: str, directory: Path, flags: str, *, name: str = "train", **settings: Any) -> list[str]:
    """Return the arguments of a run in a directory, which is made, with what `make_inputs` wrote.

    `name` is the command, with further words before the model.
    """
    directory.mkdir(parents=True, exist_ok=True)
    stated = SETTINGS | {"dataset": str(root / "rows.jsonl")} | settings
    (directory / "settings.yaml").write_text(json.dumps(stated))
    train = [*warm_command("shardwright"), *name.split(), str(root / model), "--config", "settings.yaml"]
    return [*train, *flags.split(), "--output-dir", "out", "--format", "json"]


def trained(root: Path, model: str, directory: Path, flags: str, **settings: Any) -> tuple[Losses, dict[str, Any]]:
    done = completed(command(root, model, directory, flags, **settings), directory)
    return losses_of(directory), json.loads(done.stdout)


def completed(arguments: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    """Run a command to its end in a directory. Raises: RuntimeError: it failed."""
    done = subprocess.run(arguments, capture_output=True, text=True, cwd=directory, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: {done.stderr}")
    return done


def resumed(root: Path, model: str, directory: Path, flags: str, **settings: Any) -> tuple[Losses, dict[str, Any]]:
    """Return the same for a run that resumes from the second step of one in `directory`."""
    place = directory / "resumed"
    checkpoint = Path("out", "checkpoints", "checkpoint-2")
    shutil.move(directory / checkpoint, place / checkpoint)
    return trained(root, model, place, f"{flags} --resume", **settings)


def taken_away(out: Path) -> dict[str, bytes]:
    """Leave a finished run as one that was killed behind its last checkpoint, and return its weights."""
    weights = {file.name: file.read_bytes() for file in out.glob("*.safetensors")}
    for name in (*weights, "REPORT.md", "report.json", "report.html"):
        (out / name).unlink()
    return weights


def losses_of(directory: Path) -> Losses:
    """Return the loss of each step that a run has written so far."""
    metrics = directory / "out" / "metrics.jsonl"
    return [json.loads(step)["loss"] for step in metrics.read_text().splitlines()] if metrics.exists() else []


def cross_entropy(directory: Path, samples: list[dict[str, Any]]) -> tuple[float, float]:
    """Return the mean over all predicted tokens of what Transformers loads, as a user would compute it, and its error.

    All samples are equally long, so that the error is that of the mean over samples.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory)
    ids_NS = torch.tensor([sample["input_ids"] for sample in samples])
    with torch.no_grad():
        log_probabilities = torch.log_softmax(model(ids_NS).logits[:, :-1].double(), -1)
    means_N = -log_probabilities.gather(2, ids_NS[:, 1:, None]).mean((1, 2))
    return float(means_N.mean()), float(means_N.std() / len(means_N) ** 0.5)
