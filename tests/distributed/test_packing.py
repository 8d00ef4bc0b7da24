"""Packed conversations in `train`, `distill` and `qat`: the losses of single ones.

`tests/equivalence` compares packed samples under every layout; these are the commands, of which `make test` runs one of
each kind.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from shardwright.cli.main import run
from training_runs import LAYOUTS, make_inputs, method_of, model_of, resumed, trained

pytestmark = [pytest.mark.distributed, pytest.mark.once]

CHATS = 24
SEPARATE = {"evaluation_dataset": "../others.jsonl", "chat_template": "alpaca", "seq-len": 128, "max_steps": 2}
"""Every chat is trained on, in every step; two steps show that the gradients of the first are equal."""
PADDED = SEPARATE | {"packing": "off", "global_batch_size": CHATS}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("packed")
    make_inputs(root)
    from distilling import tiny

    for seed, name in enumerate(("llama", "teacher")):
        model = tiny("llama", hidden=64, vocab_size=300, max_position_embeddings=128, seed=seed)
        model.save_pretrained(root / name)
    rows = []
    for number in range(CHATS + 4):
        turns = [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": "ja" * (number % 7)}]
        rows.append({"messages": turns})
    for name, part in (("rows.jsonl", rows[:CHATS]), ("others.jsonl", rows[CHATS:])):
        (root / name).write_text("".join(f"{json.dumps(row)}\n" for row in part))
    return root


@pytest.fixture(scope="module")
def padded(inputs: Path) -> Any:
    found: dict[str, Any] = {}

    def of(layout: str) -> Any:
        key = model_of(layout), f"--hardware 1xCPU {method_of(layout)}"
        if key not in found:
            found[key] = trained(inputs, key[0], inputs / f"padded{len(found)}", key[1], **PADDED)
        return found[key]

    return of


@pytest.mark.parametrize(
    "layout", ["fsdp2", *(pytest.param(each, marks=pytest.mark.full) for each in ("tp", "ep", "lora"))]
)
def test_losses_are_those_of_padded_conversations(
    inputs: Path, padded: Any, layout: str, deepspeed_cpu_ops: None
) -> None:
    expected, alone = padded(layout)
    batch = {"packing": "on", "global_batch_size": 10}
    flags = f"--hardware 2xCPU {LAYOUTS[layout]}"
    losses, shown = trained(inputs, model_of(layout), inputs / layout, flags, **(SEPARATE | batch))
    dataset = shown["dataset"]
    assert (dataset["train_samples"], dataset["packed_documents"]) == (10, CHATS)
    assert dataset["train_tokens"] == alone["dataset"]["train_tokens"]
    assert losses[0] == pytest.approx(expected[0], abs=1e-6)
    assert losses[1] == pytest.approx(expected[1], abs=1e-5)
    for when in ("before", "after"):
        assert shown["cross_entropy"][when] == pytest.approx(alone["cross_entropy"][when], abs=1e-5)


def test_a_packed_run_resumes_with_the_same_losses(inputs: Path, tmp_path: Path) -> None:
    settings = SEPARATE | {"packing": "on", "global_batch_size": 4, "max_steps": 5, "save_steps": 2}
    settings |= {"evaluation_dataset": str(inputs / "others.jsonl")}
    run = inputs, "llama", tmp_path, "--hardware 2xCPU --strategy zero2"
    losses, shown = trained(*run, **settings)
    again, found = resumed(*run, **settings)
    assert again == losses and found["cross_entropy"] == shown["cross_entropy"]


TEACHER = "--alpha 0.7 --temperature 2"
OTHER_COMMANDS = {
    "distill": f"{TEACHER} --hidden-states 0.5 --attention 0.5",
    "distill-cached": TEACHER,
    "qat": f"--scheme W4A16 --group-size 32 --teacher self {TEACHER}",
}


def other_run(inputs: Path, directory: Path, kind: str, flags: str, **settings: Any) -> Any:
    """Return the losses and the JSON of a run of `distill` or `qat`."""
    name, _, more = kind.partition("-")
    words = f"distill {inputs / 'teacher'}" if name == "distill" else name
    if more == "cached":
        flags = f"{flags} --teacher-cache {inputs / 'cache'}"
    settings = SEPARATE | settings | {"evaluation_dataset": str(inputs / "others.jsonl")}
    return trained(inputs, "llama", directory, f"{flags} {OTHER_COMMANDS[kind]}", name=words, **settings)


@pytest.fixture(scope="module")
def cached(inputs: Path) -> None:
    """A cache of all conversations, with `--packing on`, which does not change it."""
    for name in ("rows.jsonl", "others.jsonl"):
        words = f"cache-teacher {inputs / 'teacher'} --output-dir {inputs / 'cache'} --dataset {inputs / name}"
        assert run(f"{words} --chat-template alpaca --seq-len 128 --temperature 2 --packing on".split()) == 0


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("distill-cached", "zero2"),
        *(pytest.param(*cell, marks=pytest.mark.full) for cell in (("qat", "fsdp2"), ("distill", "zero3"))),
    ],
)
def test_other_commands_have_the_losses_of_padded_conversations(
    inputs: Path, tmp_path: Path, cached: None, kind: str, layout: str, deepspeed_cpu_ops: None
) -> None:
    expected, alone = other_run(inputs, tmp_path / "padded", kind, "--hardware 1xCPU", **PADDED)
    batch = {"packing": "on", "global_batch_size": 10}
    losses, shown = other_run(inputs, tmp_path / "packed", kind, f"--hardware 2xCPU {LAYOUTS[layout]}", **batch)
    dataset = shown["dataset"]
    assert (dataset["train_samples"], dataset["packed_documents"]) == (10, CHATS)
    assert dataset["train_tokens"] == alone["dataset"]["train_tokens"]
    assert losses[0] == pytest.approx(expected[0], abs=1e-6)
    if kind != "qat":
        # A difference of 1e-8 in a weight can change its code.
        assert losses[1] == pytest.approx(expected[1], abs=1e-5)
    out = tmp_path / "packed" / "out"
    assert "| Tokens/s of all ranks" in (out / "REPORT.md").read_text()
    assert all("positions_per_second" in json.loads(step) for step in (out / "metrics.jsonl").read_text().splitlines())
