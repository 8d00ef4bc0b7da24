"""`shardwright evaluate` and the `eval_loss` of a Trainer count every token once."""

from __future__ import annotations

from pathlib import Path

import pytest
import shardwright
from equivalence.cases import EVALUATED, LONGEST, VOCAB_SIZE, Case, make_model, samples
from equivalence.runs import make_trainer
from shardwright.trainers.evaluation.measures import TextWindows
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

pytestmark = pytest.mark.slow

EXACT = 2e-6
"""Largest difference of a loss, in nats: one number to six digits."""


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_evaluate_command_matches_trainer_loss(family: str, tmp_path: Path) -> None:
    """Transformers derives from the class whether a loss shifts labels, and misses GPT-2."""
    make_model(family, {}).save_pretrained(tmp_path)
    words = Tokenizer(models.WordLevel({str(index): index for index in range(VOCAB_SIZE)}, "0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    rows = [{name: row["input_ids"].tolist() for name in row} for row in samples()[-EVALUATED:]]
    windows = TextWindows(windows=tuple(rows), source="", seq_len_tokens=LONGEST, available_windows=EVALUATED)
    found = shardwright.evaluate(str(tmp_path), text=windows, device="cpu").model
    loss = found.loss_nats_per_token.value
    for batch_size in (1, 3, 7):
        trainer, _, _ = make_trainer(Case(layout="single", model=family), tmp_path / "out")
        trainer.args.per_device_eval_batch_size = batch_size
        evaluated = [{**row, "labels": row["input_ids"]} for row in samples()[-EVALUATED:]]
        assert trainer.evaluate(evaluated)["eval_loss"] == pytest.approx(loss, abs=EXACT)
