"""Classes of users behind `ExactTrainer` train as they do without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from shardwright.trainers.exact import count_as_one_process, exact_class, make_exact
from small_models import llama
from transformers import Trainer, TrainingArguments


class WithOwnNames(Trainer):  # type: ignore[misc]
    """Uses short names for itself, and `train` and `compute_loss` without the parameters of Transformers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.axis, self.balance, self.counting, self.repeated = -1, 0.5, 0, 2
        self._events: list[str] = []
        self._items, self._evaluation = 7, "none"

    def train(self) -> Any:
        self._events.append("train")
        return super().train()

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        model.train()
        loss = self.compute_loss(model, self._prepare_inputs(inputs))
        self.accelerator.backward(loss)
        return loss.detach()

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        return self._own_loss(model, inputs, return_outputs)

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return self.compute_loss(model, self._prepare_inputs(inputs)).detach(), None, None

    def _own_loss(self, model: Any, inputs: Any, return_outputs: bool) -> Any:
        outputs = model(**inputs)
        loss = (1 + self.balance) * outputs.loss
        return (loss, outputs) if return_outputs else loss

    def _evaluating(self) -> None:
        raise AssertionError("belongs to this class")


def made(kind: type, directory: Path, **settings: Any) -> Any:
    torch.manual_seed(0)
    arguments = TrainingArguments(
        str(directory), use_cpu=True, report_to="none", disable_tqdm=True, max_steps=2, logging_steps=1, **settings
    )
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 64, (8, 6))]
    return kind(llama(hidden_size=16, vocab_size=64), arguments, train_dataset=rows, eval_dataset=rows)


def losses(trainer: Any) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_names_and_parameters_of_a_class_stay_its_own(tmp_path: Path) -> None:
    expected, trainer = losses(made(WithOwnNames, tmp_path)), make_exact(made(WithOwnNames, tmp_path))
    assert losses(trainer) == expected
    assert trainer.evaluate()["eval_loss"] == pytest.approx(made(WithOwnNames, tmp_path).evaluate()["eval_loss"], 0.1)
    counted = made(WithOwnNames, tmp_path)
    count_as_one_process(counted)
    assert losses(counted) == pytest.approx(expected, rel=1e-6)
    assert counted.evaluate()["eval_loss"] > 0
    assert (counted.axis, counted.balance, counted.counting, counted.repeated) == (-1, 0.5, 0, 2)
    assert (counted._events, counted._items, counted._evaluation) == (["train"], 7, "none")


def test_an_evaluation_after_a_failed_one_gathers_every_row(tmp_path: Path) -> None:
    trainer = made(Trainer, tmp_path, per_device_eval_batch_size=3)
    count_as_one_process(trainer)
    expected, gather = trainer.predict(trainer.eval_dataset), trainer.gather_function

    def failing(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no logits")

    trainer.preprocess_logits_for_metrics = failing
    with pytest.raises(RuntimeError, match="no logits"):
        trainer.predict(trainer.eval_dataset)
    assert trainer.gather_function == gather
    trainer.preprocess_logits_for_metrics = None
    again = trainer.predict(trainer.eval_dataset)
    assert again.predictions.shape == expected.predictions.shape
    assert again.metrics["test_loss"] == expected.metrics["test_loss"]


def test_a_checkpoint_that_an_own_train_selects_is_compared(tmp_path: Path) -> None:
    class Resuming(Trainer):  # type: ignore[misc]
        def train(self) -> Any:
            return super().train(resume_from_checkpoint="selected")

    def check(trainer: Any, resume: Any) -> str:
        compared.append(resume)
        raise InterruptedError

    compared: list[Any] = []
    for kind, arguments in ((Resuming, ()), (Trainer, ("given",))):
        trainer = make_exact(made(kind, tmp_path))
        trainer.checked_checkpoint = check
        with pytest.raises(InterruptedError):
            trainer.train(*arguments)
    assert compared == ["selected", "given"]
    assert type(make_exact(made(Resuming, tmp_path))) is exact_class(Resuming)
