"""Every parallel layout trains as one process does, step by step, and its checkpoint loads in plain Transformers.

The reference is the Trainer of Transformers in one process, this one. A case runs once, in ranks of its own, when a
test first asks for it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from equivalence.cases import (
    CASES,
    LOGIT_TOLERANCE,
    LOSS_TOLERANCE,
    MAX_GRAD_NORM,
    STEPS,
    WEIGHT_TOLERANCE,
    Case,
    make_model,
    probe_batch,
    reference_of,
)
from equivalence.training import train_case
from safetensors.torch import load_file
from warm_ranks import OnDemand, run_ranks

pytestmark = pytest.mark.distributed

REFERENCES = list(dict.fromkeys(reference_of(case) for case in CASES))


MISTAKES = {
    # Weighs every micro-batch alike, however many tokens it has.
    "mean-of-means": lambda trainer: setattr(trainer, "model_accepts_loss_kwargs", False),
    # Clips as a gradient norm would that is one percent too small.
    "clipping": lambda trainer: setattr(trainer.args, "max_grad_norm", 1.01 * MAX_GRAD_NORM),
}


class Runs:
    def __init__(self, directory: Path, models: Path) -> None:
        self.models = models
        self._directory = directory
        self.directories = OnDemand(self._run)

    def _run(self, case: Case) -> Path:
        directory = self._directory / case.name
        directory.mkdir()
        if case.strategy.engine == "single":
            train_case(case, self.models, directory)
        else:
            run_ranks([Path(__file__).with_name("training.py"), self.models, directory, case.name], ranks=case.ranks)
        return directory

    def record(self, case: Case) -> dict[str, Any]:
        record: dict[str, Any] = json.loads((self.directories[case] / "record.json").read_text())
        return record

    def weights(self, case: Case) -> dict[str, Any]:
        files = sorted((self.directories[case] / "model").glob("*.safetensors"))
        return {name: tensor for file in files for name, tensor in load_file(file).items()}

    def reloaded_logits(self, case: Case) -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        directory = self.directories[case] / "model"
        model = AutoModelForCausalLM.from_pretrained(directory, use_safetensors=True, trust_remote_code=False)
        with torch.no_grad():
            return model.eval()(**probe_batch(), use_cache=False).logits


@pytest.fixture(scope="module")
def runs(deepspeed_cpu_ops: None, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    models = tmp_path_factory.mktemp("models")
    for family in ("llama", "mixtral"):
        make_model(family, {}).save_pretrained(models / family)
    return Runs(tmp_path_factory.mktemp("runs"), models)


def largest_difference(one: Any, other: Any) -> float:
    assert one.shape == other.shape
    return float((one - other).abs().max() / other.abs().max())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_losses_equal_one_process(case: Case, runs: Runs) -> None:
    record, reference = runs.record(case), runs.record(reference_of(case))
    assert record["world_size"] == case.ranks
    assert len(record["losses"]) == STEPS
    assert record["losses"] == pytest.approx(reference["losses"], rel=0, abs=LOSS_TOLERANCE)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_final_weights_equal_one_process(case: Case, runs: Runs) -> None:
    weights, expected = runs.weights(case), runs.weights(reference_of(case))
    assert weights.keys() == expected.keys()
    differences = {name: largest_difference(weights[name], expected[name]) for name in expected}
    wrong = {name: difference for name, difference in differences.items() if not difference <= WEIGHT_TOLERANCE}
    assert not wrong


# Without ZeRO, DeepSpeed tells no norm but of a pipeline; SGD shows a wrong one in the weights.
@pytest.mark.parametrize("case", [case for case in CASES if case.layout != "zero0"], ids=lambda case: case.name)
def test_gradient_norms_equal_one_process(case: Case, runs: Runs) -> None:
    record, reference = runs.record(case), runs.record(reference_of(case))
    assert record["grad_norms"] == pytest.approx(reference["grad_norms"], rel=WEIGHT_TOLERANCE)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_checkpoint_has_the_trained_logits_in_transformers(case: Case, runs: Runs) -> None:
    reloaded = runs.reloaded_logits(case)
    live = load_file(runs.directories[case] / "live_logits.safetensors")["logits_BTV"]
    assert largest_difference(reloaded, live) <= LOGIT_TOLERANCE
    assert largest_difference(reloaded, runs.reloaded_logits(reference_of(case))) <= WEIGHT_TOLERANCE


@pytest.mark.parametrize("reference", REFERENCES, ids=lambda case: case.name)
def test_reference_learns_and_clips_every_step(reference: Case, runs: Runs) -> None:
    """Losses that do not move would agree whatever the optimizer does, and so would clipping that never acts."""
    record = runs.record(reference)
    assert record["losses"][-1] < record["losses"][0] - 0.2
    assert all(norm > 1.2 * MAX_GRAD_NORM for norm in record["grad_norms"])


@pytest.mark.parametrize("mistake", MISTAKES)
def test_comparison_detects_a_small_error(mistake: str, runs: Runs, tmp_path: Path) -> None:
    """Ragged micro-batches with other weights, or a norm that is one percent off, miss the tolerances by far."""
    reference = next(case for case in REFERENCES if case.optimizer == "sgd" and "x3" in case.name)
    train_case(reference, runs.models, tmp_path, change=MISTAKES[mistake])
    wrong = load_file(tmp_path / "model" / "model.safetensors")
    expected = runs.weights(reference)
    assert max(largest_difference(wrong[name], expected[name]) for name in expected) > 5 * WEIGHT_TOLERANCE
