"""Training in pipeline stages equals the stock Trainer in one process: losses, gradient norms, weights, evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_cases import FOUR_RANKS, TWO_RANKS, Case, data_of, untrained_model
from shardwright.plugins.launching import torchrun

pytestmark = pytest.mark.distributed

LOSS_TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 1e-4
"""Largest difference in a tensor over its largest value."""
BF16_TOLERANCE = 2e-2
"""DeepSpeed computes with bf16 weights, the reference with fp32 ones under autocast."""


def launch(ranks: int, output: Path) -> Path:
    worker = Path(__file__).with_name("pipeline_worker.py")
    tests = str(Path(__file__).parent.parent)
    torchrun([str(worker), str(output)], ranks=ranks, timeout_seconds=240, environment={"PYTHONPATH": tests})
    return output


@pytest.fixture(scope="module")
def two_ranks(deepspeed_cpu_ops: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the runs of two stages wrote to."""
    return launch(2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four_ranks(deepspeed_cpu_ops: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the runs of two stages in two replicas wrote to."""
    return launch(4, tmp_path_factory.mktemp("four"))


def in_one_process(case: Case, output: Path) -> tuple[Any, list[dict[str, float]]]:
    """Train with the stock Trainer; return the model and its log."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(**case.single_process().arguments(output, pipeline=False), use_cpu=True)
    trainer = Trainer(untrained_model(case.family), arguments, **data_of(case))
    trainer.train()
    return trainer.model, trainer.state.log_history


def token_mean_loss(model: Any, case: Case) -> float:
    """Return the mean cross-entropy over all predicted tokens of the evaluation samples, one sample at a time."""
    total, tokens = 0.0, 0
    for sample in data_of(case)["eval_dataset"]:
        ids_BS = torch.tensor([sample["input_ids"]])
        with torch.no_grad():
            total += model.eval()(input_ids=ids_BS, labels=ids_BS).loss.item() * (ids_BS.shape[1] - 1)
        tokens += ids_BS.shape[1] - 1
    return total / tokens


def check(case: Case, directory: Path, output: Path) -> None:
    from transformers import AutoModelForCausalLM

    found = json.loads((directory / f"{case.name}.json").read_text())
    model, log = in_one_process(case, output)
    loss_tolerance = BF16_TOLERANCE if case.bf16 else LOSS_TOLERANCE
    losses = [entry["loss"] for entry in log if "loss" in entry]
    assert found["losses"] == pytest.approx(losses, abs=loss_tolerance)
    norms = [entry["grad_norm"] for entry in log if "grad_norm" in entry]
    assert norms[0] > 0.5, "clipping must be active"
    assert found["norms"] == pytest.approx(norms, rel=0.1 if case.bf16 else 1e-4)
    before = token_mean_loss(untrained_model(case.family), case)
    after = token_mean_loss(model, case)
    assert found["evaluations"] == pytest.approx([before, after], abs=loss_tolerance)
    if case.bf16:
        return
    loaded = AutoModelForCausalLM.from_pretrained(directory / case.name / "model").state_dict()
    expected = model.state_dict()
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        difference = (loaded[name] - tensor).abs().max() / tensor.abs().max()
        assert difference < WEIGHT_TOLERANCE, (name, difference)


@pytest.mark.parametrize("case", TWO_RANKS, ids=lambda case: case.name)
def test_two_stages_train_as_one_process_does(case: Case, two_ranks: Path, tmp_path: Path) -> None:
    check(case, two_ranks, tmp_path)


@pytest.mark.parametrize("case", FOUR_RANKS, ids=lambda case: case.name)
def test_replicas_of_two_stages_train_as_one_process_does(case: Case, four_ranks: Path, tmp_path: Path) -> None:
    check(case, four_ranks, tmp_path)
