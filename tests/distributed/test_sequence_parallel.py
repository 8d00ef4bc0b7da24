"""Shared sequences train and evaluate as one process does, with every ZeRO stage, loss and switch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sequence_cases import FOUR_RANKS, TWO_RANKS, Case, run
from warm_ranks import on_ranks

pytestmark = pytest.mark.distributed

WORKER = Path(__file__).with_name("sequence_cases.py")

LOSS_TOLERANCE = 1e-5
"""Sums in another order. Seen: 1e-6; 9e-6 of a norm."""
WEIGHT_TOLERANCE = 1e-4
"""Largest difference of a weight, relative to its tensor's largest. Seen: 5e-7 with SGD; 4e-5 with Adam, which divides
gradients near 0 by their own size."""


Outputs = dict[str, Path]
"""Where ranks left what they did, by the case's name, done when a test asks for it."""


@pytest.fixture(scope="module")
def two_ranks(deepspeed_cpu_ops: None, tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    return on_ranks(WORKER, tmp_path_factory.mktemp("sequence-2"))


@pytest.fixture(scope="module")
def four_ranks(deepspeed_cpu_ops: None, tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    return on_ranks(WORKER, tmp_path_factory.mktemp("sequence-4"), ranks=4)


def of_stock(outputs: Outputs, name: str) -> list[str]:
    return [json.loads(path.read_text())[name] for path in sorted(outputs["stock"].glob("stock-*.json"))]


def values(logs: list[dict[str, Any]], name: str) -> list[float]:
    return [float(entry[name]) for entry in logs if name in entry]


def check_equal(case: Case, outputs: Outputs, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    trainer, expected = run(case.alone, tmp_path, {"use_cpu": True})
    output = outputs[case.name]
    logs = json.loads((output / f"{case.name}.json").read_text())
    names = ["loss"] + ["eval_spread", "eval_right"] * case.evaluates
    names += ["eval_loss"] * case.evaluates
    names += ["grad_norm"]
    assert len(values(expected, "loss")) == case.steps
    for name in names:
        assert values(logs, name) == pytest.approx(values(expected, name), rel=LOSS_TOLERANCE, abs=LOSS_TOLERANCE), name
    found = load_file(output / f"{case.name}.safetensors")
    weights = dict(trainer.model.state_dict())
    assert values(expected, "loss")[-1] != pytest.approx(values(expected, "loss")[0], abs=1e-3)
    for name, weight in weights.items():
        if name in found or not case.tied:
            difference = (found[name] - weight).abs().max() / weight.abs().max().clamp(min=1e-12)
            assert difference < WEIGHT_TOLERANCE, name


@pytest.mark.parametrize("case", TWO_RANKS, ids=lambda case: case.name)
def test_two_ranks_equal_one(case: Case, two_ranks: Outputs, tmp_path: Path) -> None:
    check_equal(case, two_ranks, tmp_path)


@pytest.mark.parametrize("case", FOUR_RANKS, ids=lambda case: case.name)
def test_four_ranks_equal_one(case: Case, four_ranks: Outputs, tmp_path: Path) -> None:
    check_equal(case, four_ranks, tmp_path)


def test_stock_loss_fails_for_several_samples(two_ranks: Outputs) -> None:
    """Fails when transformers (5.17.0) or deepspeed (0.19.8) repair it."""
    assert any("view size is not compatible" in text for text in of_stock(two_ranks, "failure"))


def test_stock_loss_fails_with_data_parallelism(four_ranks: Outputs) -> None:
    """Fails when torch (2.13.0) repairs the backward pass of its differentiable gather on gloo."""
    assert any("not part of group" in text for text in of_stock(four_ranks, "failure"))


def test_stock_attention_and_groups_stay_for_the_process(two_ranks: Outputs) -> None:
    """Fails when deepspeed (0.19.8) leaves other models and a second run alone."""
    stock, own = "deepspeed.runtime.sequence_parallel.ulysses_sp", "transformers.integrations.sdpa_attention"
    assert of_stock(two_ranks, "attention") == [stock, stock]
    assert all("already initialized" in text for text in of_stock(two_ranks, "second run"))
    assert of_stock(two_ranks, "attention afterwards") == [own, own]
