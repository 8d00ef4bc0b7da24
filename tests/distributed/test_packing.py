"""`shardwright train` on packed conversations: the losses of padded ones, under every layout that packs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from training_runs import LAYOUTS, make_inputs, method_of, trained

pytestmark = pytest.mark.distributed

CHATS = 24
SEPARATE = {"evaluation_dataset": "../others.jsonl", "chat_template": "alpaca", "seq-len": 128, "max_steps": 2}
"""Every chat is trained on, in every step; two steps show that the gradients of the first are equal."""
PADDED = SEPARATE | {"packing": "off", "global_batch_size": CHATS}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("packed")
    make_inputs(root)
    from distilling import tiny

    tiny("llama", hidden=64, vocab_size=300, max_position_embeddings=128).save_pretrained(root / "llama")
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
        flags = f"--hardware 1xCPU {method_of(layout)}"
        if flags not in found:
            found[flags] = trained(inputs, "llama", inputs / f"padded{len(found)}", flags, **PADDED)
        return found[flags]

    return of


@pytest.mark.parametrize("layout", ["ddp", "zero1", "zero2", "zero3", "fsdp2", "tp", "lora"])
def test_losses_are_those_of_padded_conversations(
    inputs: Path, padded: Any, layout: str, deepspeed_cpu_ops: None
) -> None:
    expected, alone = padded(layout)
    batch = {"packing": "on", "global_batch_size": 10}
    losses, shown = trained(
        inputs, "llama", inputs / layout, f"--hardware 2xCPU {LAYOUTS[layout]}", **(SEPARATE | batch)
    )
    dataset = shown["dataset"]
    assert (dataset["train_samples"], dataset["packed_documents"]) == (10, CHATS)
    assert dataset["train_tokens"] == alone["dataset"]["train_tokens"]
    assert losses[0] == pytest.approx(expected[0], abs=1e-6)
    assert losses[1] == pytest.approx(expected[1], abs=1e-5)
    for when in ("before", "after"):
        assert shown["cross_entropy"][when] == pytest.approx(alone["cross_entropy"][when], abs=1e-5)
