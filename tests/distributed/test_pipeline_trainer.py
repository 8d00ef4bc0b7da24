"""Training in pipeline stages equals the stock Trainer in one process: losses, gradient norms, weights, evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence.records import logged
from pipeline_cases import FOUR_RANKS, RESUMED, TWO_RANKS, Case, collate, data_of, samples, untrained_model
from transformers import AutoModelForCausalLM
from warm_ranks import on_ranks

pytestmark = pytest.mark.distributed

WORKER = Path(__file__).with_name("pipeline_cases.py")

LOSS_TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 1e-4
"""Largest difference in a tensor over its largest value."""
BF16_TOLERANCE = 2e-2
"""DeepSpeed computes with bf16 weights, the reference with fp32 ones under autocast."""


Launch = dict[str, Path]
"""Where ranks left what they did, by the name of the run, done when a test asks for it."""


def record_of(ran: Launch, name: str) -> Any:
    return json.loads((ran[name] / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def two_ranks(deepspeed_cpu_ops: None, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    return on_ranks(WORKER, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four_ranks(deepspeed_cpu_ops: None, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    return on_ranks(WORKER, tmp_path_factory.mktemp("four"), ranks=4)


def in_one_process(case: Case, output: Path, **more: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(**case.single_process().arguments(output, pipeline=False, **more), use_cpu=True)
    trainer = Trainer(untrained_model(case.family), arguments, **data_of(case))
    trainer.train()
    return trainer


def token_mean_loss(model: Any, case: Case) -> float:
    """Return the mean cross-entropy over all predicted tokens of the evaluation samples, one sample at a time."""
    total, tokens = 0.0, 0
    for sample in data_of(case)["eval_dataset"]:
        ids_BS = torch.tensor([sample["input_ids"]])
        with torch.no_grad():
            total += model.eval()(input_ids=ids_BS, labels=ids_BS).loss.item() * (ids_BS.shape[1] - 1)
        tokens += ids_BS.shape[1] - 1
    return total / tokens


def check(case: Case, ran: Launch, output: Path) -> None:
    found, expected = record_of(ran, case.name), in_one_process(case, output)
    loss_tolerance = BF16_TOLERANCE if case.bf16 else LOSS_TOLERANCE
    assert found["losses"] == pytest.approx(logged(expected, "loss"), abs=loss_tolerance)
    norms = logged(expected, "grad_norm")
    assert norms[0] > case.arguments(output, pipeline=True)["max_grad_norm"], "clipping must be active"
    assert found["norms"] == pytest.approx(norms, rel=0.1 if case.bf16 else 1e-5)
    assert found["evaluation"] == pytest.approx(token_mean_loss(expected.model, case), abs=loss_tolerance)
    loaded = AutoModelForCausalLM.from_pretrained(ran[case.name] / case.name / "model").state_dict()
    trained = expected.model.state_dict()
    assert loaded.keys() == trained.keys()
    for name, tensor in {} if case.bf16 else trained.items():
        difference = (loaded[name] - tensor).abs().max() / tensor.abs().max()
        assert difference < WEIGHT_TOLERANCE, (name, difference)


@pytest.mark.parametrize("case", TWO_RANKS, ids=lambda case: case.name)
def test_two_stages_train_as_one_process(case: Case, two_ranks: Launch, tmp_path: Path) -> None:
    check(case, two_ranks, tmp_path)


@pytest.mark.parametrize("case", FOUR_RANKS, ids=lambda case: case.name)
def test_four_ranks_train_as_one_process(case: Case, four_ranks: Launch, tmp_path: Path) -> None:
    check(case, four_ranks, tmp_path)


def test_resumed_training_has_the_losses_of_an_uninterrupted_one(two_ranks: Launch) -> None:
    found = record_of(two_ranks, "interrupted")
    assert found["resumed from"] == len(found["whole"]) == 4
    assert found["resumed"] == found["whole"]
    cut = json.loads((two_ranks["interrupted"] / "interrupted" / "checkpoint-2" / "pipeline_cut.json").read_text())
    assert cut == {"stages": "0-2, 2-3", "tensor_parallel_size": 1, "dual_pipe": False}


def test_evaluation_and_token_counts_equal_those_of_one_process(two_ranks: Launch, tmp_path: Path) -> None:
    found = record_of(two_ranks, "interrupted")
    more = {"include_num_input_tokens_seen": "non_padding", "max_steps": 4, "lr_scheduler_type": "cosine"}
    expected = in_one_process(RESUMED, tmp_path, **more)
    assert found["whole"] == pytest.approx(logged(expected, "loss"), abs=LOSS_TOLERANCE)
    assert found["tokens"] == expected.state.num_input_tokens_seen
    before, after = (token_mean_loss(model, RESUMED) for model in (untrained_model(RESUMED.family), expected.model))
    assert [found["before"], found["evaluations"][-1]] == pytest.approx([before, after], abs=LOSS_TOLERANCE)
    assert found["from directory"] == pytest.approx(after, abs=LOSS_TOLERANCE)


def test_callbacks_receive_every_event(two_ranks: Launch) -> None:
    found = record_of(two_ranks, "interrupted")
    assert found["events"] == {"step_begin": 4, "substep_end": 8, "step_end": 4, "evaluate": 3}
    assert found["complete"]


def test_saved_model_has_the_logits_of_the_stages(two_ranks: Launch) -> None:
    assert record_of(two_ranks, "interrupted")["complete"]
    directory = two_ranks["interrupted"] / "interrupted"
    probe = collate(samples(2, ragged=True, seed=5))
    model = AutoModelForCausalLM.from_pretrained(directory / "model").eval()
    with torch.no_grad():
        logits_BSV = model(input_ids=probe["input_ids"], attention_mask=probe["attention_mask"]).logits
    seen_BS = probe["attention_mask"].bool()
    live_BSV = torch.load(directory / "logits.pt", weights_only=True)
    torch.testing.assert_close(live_BSV[seen_BS], logits_BSV[seen_BS], atol=1e-5, rtol=0)


def test_deepspeed_still_counts_only_gradients_of_the_first_stage(two_ranks: Launch) -> None:
    """Fails when DeepSpeed counts 3 on one stage and 4 on the other as 5 (seen in 0.19.8); `repair_clipping` can go."""
    assert record_of(two_ranks, "upstream-norm") == 3.0
