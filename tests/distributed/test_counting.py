"""Trainers count labels, samples and tokens as one process does, under every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from counting_cases import EVALUATED, WORK, make_trainer, plain, rows
from equivalence.cases import LONGEST, VOCAB_SIZE, make_model
from warm_ranks import OnDemand, run_ranks

pytestmark = pytest.mark.distributed

EXACT = 2e-6
"""Largest difference of an evaluation's loss, in nats: one number to six digits."""
TRAINED = 1e-5
"""Largest difference of a training's counts."""
LAYOUTS = {
    "ddp": ("counted", "evaluated", "without_labels", "heads", "streams", "own_losses"),
    "zero1": ("counted", "options", "stopped_early"),
    "zero2": ("own_losses",),
    "zero3": ("counted", "evaluated", "without_labels", "heads", "streams"),
    "fsdp2": ("counted", "evaluated", "without_labels", "options", "heads", "streams", "own_losses"),
    "tp2-zero1": ("counted", "evaluated", "without_labels"),
    "sp2-zero1": ("counted", "evaluated", "without_labels"),
    "pp2-zero0": ("counted", "evaluated", "without_labels", "stopped_early"),
    "cp2-fsdp2": ("counted", "without_labels"),
}
"""Runs under each layout; context parallelism does not evaluate."""
PREFERENCES = ("zero3", "sp2-zero1")


@pytest.fixture(scope="module")
def records(deepspeed_cpu_ops: None, tmp_path_factory: pytest.TempPathFactory) -> OnDemand[tuple[str, ...], Any]:
    directory = tmp_path_factory.mktemp("counting")

    def run(key: tuple[str, ...]) -> dict[str, Any]:
        layout, *works = key
        names = [f"{work}-{layout}" for work in works]
        run_ranks([Path(__file__).with_name("counting_cases.py"), directory, *names], timeout_seconds=300)
        return {work: json.loads((directory / f"{work}-{layout}.json").read_text()) for work in works}

    return OnDemand(run)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> OnDemand[str, Any]:
    directory = tmp_path_factory.mktemp("single")
    return OnDemand(lambda work: WORK[work]("single", directory / work))


def compared(records: Any, expected: Any, layout: str, work: str, tolerance: float) -> dict[str, Any]:
    found, wanted = records[(layout, *LAYOUTS[layout])][work], expected[work]
    common = {name: wanted[name] for name in found}
    assert {name: pytest.approx(value, abs=tolerance) for name, value in common.items()} == found
    return dict(found)


def under(work: str) -> list[str]:
    return [layout for layout, works in LAYOUTS.items() if work in works]


@pytest.mark.parametrize("layout", under("counted"))
def test_losses_norms_and_tokens_equal_one_process(records: Any, expected: Any, layout: str) -> None:
    found = compared(records, expected, layout, "counted", TRAINED)
    assert found.keys() == expected["counted"].keys()


@pytest.mark.parametrize("layout", under("evaluated"))
def test_evaluations_count_every_sample_once(records: Any, expected: Any, layout: str) -> None:
    found = compared(records, expected, layout, "evaluated", EXACT)
    assert found["loss"] == pytest.approx(found["held out"], abs=EXACT)
    assert found["no labels"].startswith("eval_dataset: has no token with a label")


@pytest.mark.parametrize("layout", under("without_labels"))
def test_ranks_and_steps_without_labels_change_nothing(records: Any, expected: Any, layout: str) -> None:
    found = compared(records, expected, layout, "without_labels", TRAINED)
    assert found["losses"][1] == found["norms"][1] == 0


@pytest.mark.parametrize("layout", under("heads"))
def test_classification_and_regression_train_as_one_batch(records: Any, expected: Any, layout: str) -> None:
    """Their losses are means over a batch: ranks, micro-batches and last batches hold different numbers of labels."""
    found = compared(records, expected, layout, "heads", TRAINED)
    assert found.keys() == expected["heads"].keys()


@pytest.mark.parametrize("layout", under("streams"))
def test_ranks_train_equally_on_a_stream_or_stop_together(records: Any, expected: Any, layout: str) -> None:
    """Rows of different lengths, the last batch with a single one; a stream that ranks read differently is an error."""
    found = dict(records[(layout, *LAYOUTS[layout])]["streams"])
    assert "yields different rows on different ranks" in found["a part for each rank"]
    assert "ran out of rows on rank 1 before other ranks" in found["fewer on one rank"]
    assert found["whole"] == pytest.approx(expected["streams"]["whole"], rel=0, abs=TRAINED)


@pytest.mark.parametrize("layout", under("options"))
def test_losses_and_options_of_every_kind_evaluate_as_in_one_process(records: Any, expected: Any, layout: str) -> None:
    found, wanted = records[(layout, *LAYOUTS[layout])]["options"], expected["options"]
    # Ranks gather a list of batches, whose number is that of their steps.
    for options in (found, wanted):
        options["kept apart"] = options["kept apart"][:1]
    compared(records, expected, layout, "options", 1e-5)


@pytest.mark.parametrize("layout", under("own_losses"))
def test_own_losses_train_as_one_batch(records: Any, expected: Any, layout: str) -> None:
    found, wanted = records[(layout, *LAYOUTS[layout])]["own_losses"], expected["own_losses"]
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        # An added mean over values counts samples, and the stock loss labels: no weight of a batch fits both.
        if name != "stock loss and a mean over values: loss":
            assert found[name] == (value if "refused" in name else pytest.approx(value, abs=TRAINED)), name


@pytest.mark.parametrize("layout", under("stopped_early"))
def test_early_stopping_decides_as_in_one_process(records: Any, expected: Any, layout: str) -> None:
    found = compared(records, expected, layout, "stopped_early", 1e-3)
    assert found["steps"] == 3


@pytest.mark.needs("trl")
@pytest.mark.parametrize("layout", PREFERENCES)
def test_trainers_of_trl_evaluate_as_in_one_process(records: Any, expected: Any, layout: str) -> None:
    found = records[(layout, "preferences")]["preferences"]
    assert found == {name: pytest.approx(expected["preferences"][name], abs=EXACT) for name in found}


@pytest.mark.parametrize("layout", under("evaluated"))
def test_scalar_loss_counts_seven_samples(records: Any, expected: Any, layout: str) -> None:
    """The held-out loss of `train`, the `eval_loss` of a Trainer and the number of one process have six equal digits.

    `shardwright.evaluate` finds the same number, as the test of that command says.
    """
    found = records[(layout, *LAYOUTS[layout])]["evaluated"]
    numbers = [found["held out"], found["loss"], expected["evaluated"]["loss"]]
    print(layout, *(f"{number:.7f}" for number in numbers))
    assert max(numbers) - min(numbers) < EXACT


def test_evaluate_command_matches_trainer_loss(expected: Any, tmp_path: Path) -> None:
    import shardwright
    from shardwright.trainers.evaluation.measures import TextWindows
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    make_model("llama", {}).save_pretrained(tmp_path)
    words = Tokenizer(models.WordLevel({str(index): index for index in range(VOCAB_SIZE)}, "0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    windows = TextWindows(
        windows=tuple(plain(rows())),
        source="",
        seq_len_tokens=LONGEST,
        stride_tokens=LONGEST,
        available_windows=EVALUATED,
    )
    found = shardwright.evaluate(str(tmp_path), text=windows, device="cpu").model
    loss = found.loss_nats_per_token.value
    assert loss == pytest.approx(expected["evaluated"]["loss"], abs=EXACT)
    for batch_size in (1, 3, 7):
        trainer = make_trainer("single", tmp_path / "out", arguments={"per_device_eval_batch_size": batch_size})
        assert trainer.evaluate()["eval_loss"] == pytest.approx(loss, abs=EXACT)
