"""Metrics under AutoTP see each sample once, though every rank of a group evaluates it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.utils import groups
from shardwright.plugins.deepspeed.auto_tp import GroupsOnce


@pytest.mark.parametrize(("is_last", "expected"), [(False, [0, 1, 10, 11]), (True, [0, 1, 10])])
def test_results_of_data_parallel_ranks_are_gathered_without_repeated_samples(
    is_last: bool, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_gather(parts: list[torch.Tensor], own: torch.Tensor, group: Any) -> None:
        for rank, part in enumerate(parts):
            part.copy_(own + 10 * rank)

    def all_gather_object(parts: list[Any], own: list[int], group: Any) -> None:
        parts[:] = [[each + 10 * rank for each in own] for rank in range(len(parts))]

    monkeypatch.setattr(groups, "get_data_parallel_group", lambda: "data")
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: {"data": 2}[group])
    monkeypatch.setattr(torch.distributed, "all_gather", all_gather)
    monkeypatch.setattr(torch.distributed, "all_gather_object", all_gather_object)
    state = SimpleNamespace(end_of_dataloader=is_last, remainder=3)
    gather: Any = GroupsOnce(SimpleNamespace(gradient_state=state))  # type: ignore[arg-type]
    both = gather({"logits": torch.tensor([0, 1]), "labels": torch.tensor([[0], [1]])})
    assert both["logits"].tolist() == expected and both["labels"].flatten().tolist() == expected
    assert gather([0, 1]) == expected
    assert gather(torch.tensor(0)).tolist() == [0, 10]
