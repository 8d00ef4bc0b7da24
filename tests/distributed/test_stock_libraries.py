"""What Transformers and DeepSpeed get wrong under axes: each test fails when upstream fixes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from warm_ranks import OnDemand, run_ranks

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def found(deepspeed_cpu_ops: None, tmp_path_factory: pytest.TempPathFactory) -> OnDemand[int, list[dict[str, Any]]]:
    """What each rank found, by the number of ranks."""
    directory = tmp_path_factory.mktemp("stock")

    def run(ranks: int) -> list[dict[str, Any]]:
        run_ranks([Path(__file__).with_name("stock_worker.py"), directory], ranks=ranks)
        return [json.loads((directory / f"{ranks}-{rank}.json").read_text()) for rank in range(ranks)]

    return OnDemand(run)


def of_sequences(found: OnDemand[int, list[dict[str, Any]]], ranks: int, name: str) -> list[str]:
    return [each["sequences"][name] for each in found[ranks]]


def test_stock_loss_fails_for_several_samples(found: OnDemand[int, list[dict[str, Any]]]) -> None:
    """Fails when transformers (5.17.0) or deepspeed (0.19.8) repair it."""
    assert any("view size is not compatible" in text for text in of_sequences(found, 2, "failure"))


def test_stock_loss_fails_with_data_parallelism(found: OnDemand[int, list[dict[str, Any]]]) -> None:
    """Fails when torch (2.13.0) repairs the backward pass of its differentiable gather on gloo."""
    assert any("not part of group" in text for text in of_sequences(found, 4, "failure"))


def test_stock_attention_and_groups_stay_for_the_process(found: OnDemand[int, list[dict[str, Any]]]) -> None:
    """Fails when deepspeed (0.19.8) leaves other models and a second run alone."""
    stock, own = "deepspeed.runtime.sequence_parallel.ulysses_sp", "transformers.integrations.sdpa_attention"
    assert of_sequences(found, 2, "attention") == [stock, stock]
    assert all("already initialized" in text for text in of_sequences(found, 2, "second run"))
    assert of_sequences(found, 2, "attention afterwards") == [own, own]


def test_deepspeed_still_requires_marked_expert_groups(found: OnDemand[int, list[dict[str, Any]]]) -> None:
    """Fails when ZeRO-2 takes the Trainer's groups as they are: `mark_expert_groups` can go then."""
    assert all("None of the param groups are marked as MoE" in each["experts"] for each in found[2])
