"""Digests of batches, by which ranks that share a sequence detect other content."""

from __future__ import annotations

import torch
from shardwright.trainers.parallel.sequence.shards import digest_of

BATCH = {
    "input_ids": torch.arange(10).reshape(2, 5),
    "labels": torch.tensor([[0, 1, -100, 3, 4], [5, -100, -100, 8, 9]]),
    "attention_mask": torch.ones(2, 5, dtype=torch.int64),
}


def test_batches_with_other_content_have_other_digests() -> None:
    same = {name: value.clone() for name, value in reversed(BATCH.items())} | {"text": "not a tensor"}
    assert digest_of(same) == digest_of(BATCH)
    changes = {
        "value": {"input_ids": BATCH["input_ids"].flip(0)},
        "shape": {"input_ids": BATCH["input_ids"].reshape(5, 2)},
        "type": {"input_ids": BATCH["input_ids"].to(torch.float64)},
        "name": {"pixels": BATCH["input_ids"]},
    }
    assert digest_of(BATCH) not in {digest_of(BATCH | change) for change in changes.values()}
