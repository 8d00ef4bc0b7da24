"""What Transformers does by itself with samples that are grouped by length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler


def test_stock_ranks_draw_orders_of_their_own(tmp_path: Path) -> None:
    """The order comes from the random numbers of the process: `ExactTrainer._get_train_sampler` is needed."""
    rows: list[dict[str, Any]] = [{"input_ids": [1] * (1 + index % 7)} for index in range(32)]
    arguments = TrainingArguments(
        str(tmp_path), use_cpu=True, train_sampling_strategy="group_by_length", report_to="none"
    )
    trainer = Trainer(torch.nn.Linear(1, 1), arguments, train_dataset=rows)
    sampler = trainer._get_train_sampler()
    assert isinstance(sampler, LengthGroupedSampler)
    orders = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        orders.append(list(sampler))
    assert orders[0] == orders[1] != orders[2]
