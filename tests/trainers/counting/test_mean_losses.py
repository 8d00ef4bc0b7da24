"""Models whose loss is a mean: detection, and weights of micro-batches."""

from __future__ import annotations

import ast
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
import transformers
from shardwright.trainers.counting.counts import divides_by_count, passes_count, predicts_next_token, returns_mean
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, Trainer, TrainingArguments

SIZES = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}


def trainer_of(model: Any, kind: type = Trainer, **settings: Any) -> Any:
    return kind(model=model, args=TrainingArguments(use_cpu=True, report_to="none"), **settings)


def classifier(**config: Any) -> Any:
    return LlamaForSequenceClassification(LlamaConfig(**SIZES, pad_token_id=0, **config))


def test_classifiers_still_ignore_the_number_of_labels() -> None:
    model = classifier(num_labels=3)
    inputs = {"input_ids": torch.tensor([[1, 2], [3, 4]]), "labels": torch.tensor([0, 2])}
    assert trainer_of(model).model_accepts_loss_kwargs
    assert model(**inputs).loss == model(**inputs, num_items_in_batch=torch.tensor(8)).loss
    assert returns_mean(trainer_of(model))


@pytest.mark.parametrize("hands_on", [True, False])
def test_model_source_shows_whether_labels_are_counted(hands_on: bool) -> None:
    class HandsOn(LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
            return self.loss_function(input_ids, labels, 8, **kwargs)

    class Ignores(LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
            return self.loss_function(self.model(input_ids, **kwargs), labels, 8)

    model = (HandsOn if hands_on else Ignores)(LlamaConfig(**SIZES))
    assert returns_mean(trainer_of(model)) is not hands_on


@pytest.mark.full
def test_the_table_says_of_every_class_of_transformers_what_its_source_does() -> None:
    """Fails when a release changes a loss or adds a class: correct `data/label_counts.toml`."""
    root, wrong = Path(transformers.__file__).parent, []
    for file in [*root.joinpath("models").rglob("modeling_*.py"), root / "modeling_layers.py"]:
        module = ast.parse(file.read_text(encoding="utf-8"))
        for kind in (each for each in module.body if isinstance(each, ast.ClassDef)):
            for method in kind.body:
                if isinstance(method, ast.FunctionDef) and method.name == "forward" and method.args.kwarg:
                    made = FunctionType((lambda: None).__code__, {"__name__": "transformers.models"})
                    made.__qualname__ = f"{kind.name}.forward"
                    if divides_by_count(made) != passes_count(method):
                        wrong.append(kind.name)
    assert not wrong


def test_only_logits_of_a_decoder_alone_predict_the_next_token() -> None:
    t5 = transformers.T5Config(vocab_size=8, d_model=8, d_kv=8, d_ff=8, num_layers=1, num_heads=1)
    gpt2 = transformers.GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=1)
    assert predicts_next_token(transformers.GPT2LMHeadModel(gpt2))
    assert predicts_next_token(LlamaForCausalLM(LlamaConfig(**SIZES)))
    assert not predicts_next_token(transformers.T5ForConditionalGeneration(t5))
    assert not predicts_next_token(classifier(num_labels=3))
