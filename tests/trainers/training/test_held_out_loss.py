"""The held-out loss of a training run: what it counts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import small_models
import torch
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.trainers.counting.counts import evaluated_mean
from shardwright.trainers.data.samples import collate
from shardwright.trainers.runs import ranks
from shardwright.trainers.runs.ranks import held_out_cross_entropy
from transformers import Trainer, TrainingArguments


def test_a_batch_that_is_not_finite_is_not_left_out() -> None:
    """As Transformers 5.23 filters losses by default, and 5.17 does not."""
    assert evaluated_mean([4.0, 6.0], [2, 3]) == 2.0
    assert math.isnan(evaluated_mean([4.0, math.nan], [2, 3]))


def test_a_set_without_labels_has_no_loss() -> None:
    with pytest.raises(UsageError, match="eval_dataset: has no token with a label"):
        evaluated_mean([0.0, 0.0], [0, 0])


def test_logits_of_long_rows_exist_in_parts_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"input_ids": list(range(start, start + 60))} for start in (3, 80, 150)]
    labels = [[-100] * (20 * index) + row["input_ids"][20 * index :] for index, row in enumerate(rows)]
    samples = [row | {"labels": own} for row, own in zip(rows, labels, strict=True)]
    trainer = Trainer(
        model=small_models.llama(),
        args=TrainingArguments(str(tmp_path), per_device_eval_batch_size=2, use_cpu=True, report_to="none"),
        eval_dataset=samples,
        data_collator=collate,
    )
    whole = held_out_cross_entropy(trainer)
    largest: list[int] = []
    cross_entropy = torch.nn.functional.cross_entropy

    def watched(logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        largest.append(len(logits))
        return cross_entropy(logits, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "cross_entropy", watched)
    monkeypatch.setattr(ranks, "_EVALUATED_LOGITS_BYTES", 4 * 512 * 7)
    parts = held_out_cross_entropy(trainer)
    assert parts == pytest.approx(whole, rel=1e-6)
    assert max(largest) == 7
