"""The same zeros under every engine, and in the fp32 copies that DeepSpeed steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cases import RANKS
from shardwright.trainers.sparsity.masks import target_layers
from sparsity_cases import EVERY, EXACT, HALF, MOMENTUM, Case, model, train
from warm_ranks import OnDemand, run_ranks

pytestmark = pytest.mark.distributed

TOLERANCE = 1e-5
"""Largest difference of a weight, relative to the largest weight."""
WITH_MASTERS = [case for case in EVERY if case.engine == "deepspeed" and not case.axis]
"""Runs whose ranks hold fp32 copies of every parameter."""


@pytest.fixture(scope="module")
def on_two_ranks(
    deepspeed_cpu_ops: None, tmp_path_factory: pytest.TempPathFactory
) -> dict[Case, dict[str, torch.Tensor]]:
    from safetensors.torch import load_file

    output = tmp_path_factory.mktemp("sparsity")

    def run(case: Case) -> dict[str, torch.Tensor]:
        run_ranks([Path(__file__).with_name("sparsity_cases.py"), output, case.name], ranks=RANKS)
        assert case not in MOMENTUM or json.loads((output / f"{case.name}.json").read_text()) == [0.5]
        return dict(load_file(output / f"{case.name}.safetensors"))

    return OnDemand(run)


@pytest.fixture(scope="module")
def on_one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, dict[str, torch.Tensor]]:
    output = tmp_path_factory.mktemp("sparsity-alone")
    runs = {case: train(case, output, 1, {"use_cpu": True}) for case in {alone(case) for case in EVERY}}
    return {case: dict(trainer.model.state_dict()) for case, trainer in runs.items()}


def alone(case: Case) -> Case:
    """Return the run of one process that a case must equal; tensor parallelism has a model of another width."""
    return Case(method=case.method, axis="tp" if case.axis == "tp" else "")


def weights(ignore: list[str] | None = None) -> list[str]:
    return [f"{name}.weight" for name in target_layers(model(EVERY[0]), ["Linear"], ignore or ["lm_head"])]


@pytest.mark.parametrize("case", EXACT, ids=lambda case: case.name)
def test_two_ranks_give_the_weights_of_one(
    case: Case, on_two_ranks: dict[Case, dict[str, torch.Tensor]], on_one_rank: dict[Case, dict[str, torch.Tensor]]
) -> None:
    found, expected = on_two_ranks[case], on_one_rank[alone(case)]
    for name, value in expected.items():
        assert float((found[name] - value).abs().max()) < TOLERANCE * float(value.abs().max()), name
    zeros = {name: int((expected[name] == 0).sum()) for name in weights()}
    assert {name: int((found[name] == 0).sum()) for name in weights()} == zeros
    assert sum(zeros.values()) > 0.2 * sum(expected[name].numel() for name in weights())


@pytest.mark.parametrize("case", WITH_MASTERS, ids=lambda case: case.name)
def test_parameters_are_the_fp32_copies(case: Case, on_two_ranks: dict[Case, dict[str, torch.Tensor]]) -> None:
    found = on_two_ranks[case]
    for name in weights():
        master = found[f"master.{name}"]
        assert torch.equal(found[name], master.bfloat16().float() if case.bf16 else master), name


@pytest.mark.parametrize("case", MOMENTUM, ids=lambda case: case.name)
def test_momentum_fills_no_zeros(case: Case, on_two_ranks: dict[Case, dict[str, torch.Tensor]]) -> None:
    found = on_two_ranks[case]
    for name in weights(["lm_head", "re:.*down_proj"]):
        assert (found[name] == 0).reshape(-1, 4).sum(1).eq(2).all(), name


@pytest.mark.parametrize("case", HALF, ids=lambda case: case.name)
def test_small_steps_of_l1_reach_bf16_weights(
    case: Case, on_two_ranks: dict[Case, dict[str, torch.Tensor]], on_one_rank: dict[Case, dict[str, torch.Tensor]]
) -> None:
    found = sum(int((on_two_ranks[case][name] == 0).sum()) for name in weights())
    expected = sum(int((on_one_rank[alone(case)][name] == 0).sum()) for name in weights())
    assert found == pytest.approx(expected, rel=0.05)
