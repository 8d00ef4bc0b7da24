"""Tensor parallelism trains as one process does: losses, clipped gradients, weights, metrics and checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fresh_process import forget_last_run
from safetensors.torch import load_file
from shardwright.trainers.counting.counts import count_as_one_process
from tensor_parallel_cases import EVALUATION_SAMPLES, FOUR_RANKS, GLOBAL_BATCH_SIZE, RESUMED_AT, TWO_RANKS, Case, probe
from transformers import AutoModelForCausalLM
from warm_ranks import OnDemand, run_ranks

pytestmark = pytest.mark.distributed

LOSS_TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 1e-4
"""Relative to the norm of each tensor. Seen: 2e-7 with SGD, 5e-5 with AdamW, which magnifies rounding near zero."""
BF16_TOLERANCE = 3e-2
"""Products carry rounding errors of 2^-9."""
ALL = [*((2, case) for case in TWO_RANKS), *((4, case) for case in FOUR_RANKS)]
COMPARED = [(ranks, case) for ranks, case in ALL if case.has_reference]


Runs = dict[tuple[int, str], Path]
"""Where so many ranks left what they did, by the case's name, done when a test asks for it."""


@pytest.fixture(scope="module")
def runs(deepspeed_cpu_ops: None, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    outputs = {ranks: tmp_path_factory.mktemp(f"tp-{ranks}") for ranks in (2, 4)}

    def run(key: tuple[int, str]) -> Path:
        ranks, name = key
        run_ranks([Path(__file__).with_name("tensor_parallel_cases.py"), outputs[ranks], name], ranks=ranks)
        return outputs[ranks] / name

    return OnDemand(run)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Train the same with the stock Trainer in one process; cases that only differ in their layout share a run."""
    found: dict[str, dict[str, Any]] = {}
    known: dict[str, dict[str, Any]] = {}
    for _, case in COMPARED:
        same = ("family", "config", "optimizer", "accumulation", "steps", "iterable", "trains")
        key = repr([getattr(case, name) for name in same])
        if key not in known:
            model = case.model()
            output = str(tmp_path_factory.mktemp("single"))
            arguments = case.training_arguments(output, batch_size=GLOBAL_BATCH_SIZE, use_cpu=True)
            trainer = case.trainer(model, arguments)
            count_as_one_process(trainer)
            trainer.train()
            logged = [entry for entry in trainer.state.log_history if "loss" in entry]
            known[key] = {
                "losses": [entry["loss"] for entry in logged],
                "grad_norms": [entry["grad_norm"] for entry in logged],
                "evaluation": trainer.evaluate(),
                "weights": {name: weight.clone() for name, weight in model.state_dict().items()},
            }
        found[case.name] = known[key]
    forget_last_run()
    return found


def record(runs: Runs, ranks: int, case: Case, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((runs[ranks, case.name] / f"record-{rank}.json").read_text())
    return found


def named(value: Any) -> str:
    return value.name if isinstance(value, Case) else str(value)


@pytest.mark.parametrize(("ranks", "case"), COMPARED, ids=named)
def test_losses_and_gradient_norms_equal_those_of_one_process(
    ranks: int, case: Case, runs: Runs, references: dict[str, Any]
) -> None:
    found, expected = record(runs, ranks, case), references[case.name]
    assert found["losses"] == pytest.approx(expected["losses"], abs=LOSS_TOLERANCE)
    # Stage 0 in fp32 clips without telling the norm; SGD would show a wrong one in the weights.
    if case.zero_stage > 0:
        assert found["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-5)
    assert all(norm > 0.5 for norm in expected["grad_norms"]), "clipping is active"


def test_bf16_losses_are_close_to_fp32(runs: Runs, references: dict[str, Any]) -> None:
    case = next(case for case in TWO_RANKS if case.name == "bf16")
    assert record(runs, 2, case)["losses"] == pytest.approx(references["zero0-sgd"]["losses"], abs=BF16_TOLERANCE)


@pytest.mark.parametrize(("ranks", "case"), COMPARED, ids=named)
def test_checkpoint_has_the_weights_of_one_process(
    ranks: int, case: Case, runs: Runs, references: dict[str, Any]
) -> None:
    directory = runs[ranks, case.name]
    loaded = AutoModelForCausalLM.from_pretrained(directory / "model")
    weights, expected = loaded.state_dict(), references[case.name]["weights"]
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert (weight - expected[name]).norm() <= WEIGHT_TOLERANCE * expected[name].norm(), name
    parts = [load_file(directory / f"logits-{rank}.safetensors")["logits"] for rank in range(2)]
    live = torch.cat(parts, dim=-1) if case.vocabulary_parallel_head else parts[0]
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=probe()).logits, live, rtol=1e-5, atol=1e-5)
    assert not (directory / "model" / "training_args.bin").exists()


@pytest.mark.parametrize(("ranks", "case"), COMPARED, ids=named)
def test_metrics_count_every_sample_once(ranks: int, case: Case, runs: Runs, references: dict[str, Any]) -> None:
    found, expected = record(runs, ranks, case)["evaluation"], references[case.name]["evaluation"]
    assert found["eval_samples"] == EVALUATION_SAMPLES
    assert found["eval_tokens"] == expected["eval_tokens"]
    assert found["eval_vocabulary"] == expected["eval_vocabulary"]
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], abs=LOSS_TOLERANCE)


@pytest.mark.parametrize(("ranks", "case"), ALL, ids=named)
def test_groups_share_batches_and_unsharded_parameters(ranks: int, case: Case, runs: Runs) -> None:
    records = [record(runs, ranks, case, rank) for rank in range(ranks)]
    seen = [tuple(one["seen"]) for one in records]
    assert seen[0] == seen[1]
    assert len(set(seen)) == ranks // 2
    for one in records:
        assert one["losses"] == records[0]["losses"]
        assert one["whole_parameters_that_differ"] == []
        assert one["local_elements"] < 0.8 * sum(parameter.numel() for parameter in case.model().parameters())


def test_resumed_run_has_the_same_losses(runs: Runs) -> None:
    whole, rest = json.loads((runs[2, "resumed"] / "losses.json").read_text())
    assert len(whole) == RESUMED_AT
    assert rest == pytest.approx(whole, abs=LOSS_TOLERANCE)
    checkpoint = runs[2, "resumed"] / "whole" / f"checkpoint-{RESUMED_AT}"
    assert AutoModelForCausalLM.from_pretrained(checkpoint).config.num_attention_heads == 4


def test_errors_before_the_first_step(runs: Runs) -> None:
    layer, forgotten = json.loads((runs[2, "refused"] / "answers.json").read_text())
    assert layer.startswith("model.layers.*.mlp.extra")
    assert "no rule" in layer
    assert "callback.attach(trainer)" in forgotten
