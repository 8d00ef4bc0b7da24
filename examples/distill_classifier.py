"""Teach a small classifier with few labels: which standard-library module is a line of code from?

    python examples/distill_classifier.py

The teacher sees every labelled line. The students see few of them; one also sees what the teacher thinks of lines
without labels, whose label is the teacher's own best guess. It runs offline on a CPU in half a minute.
"""

from __future__ import annotations

import importlib
import inspect
import random
import tempfile
from typing import Any

import torch
from shardwright.trainers.distillation import AttentionTerm, DistillationConfig, DistillationTrainer
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments, set_seed

MODULES = ("argparse", "ast", "decimal", "email.message", "subprocess", "tarfile", "typing", "unittest.mock")
LONGEST, FEW = 48, 256


def lines() -> list[dict[str, Any]]:
    """Return lines as bytes, each with the number of its module, in random order."""
    found = []
    for label, name in enumerate(MODULES):
        source = inspect.getsource(importlib.import_module("_pydecimal" if name == "decimal" else name))
        kept = {line.strip() for line in source.splitlines() if 20 <= len(line.strip()) <= LONGEST}
        for line in sorted(kept)[:420]:
            found.append({"input_ids": [byte % 128 for byte in line.encode()], "labels": label})
    random.Random(0).shuffle(found)
    return found


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad with 0."""
    ids = torch.tensor([row["input_ids"] + [0] * (LONGEST - len(row["input_ids"])) for row in rows])
    return {"input_ids": ids, "attention_mask": ids.ne(0).long(), "labels": torch.tensor([r["labels"] for r in rows])}


def model(hidden_size: int, layers: int) -> Any:
    """Return a BERT with random weights."""
    set_seed(0)
    config = BertConfig(
        vocab_size=128,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=LONGEST,
        num_labels=len(MODULES),
    )
    return BertForSequenceClassification(config)


def train(student: Any, teacher: Any, config: DistillationConfig, rows: list[dict[str, Any]], steps: int) -> None:
    """Train in place."""
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            directory,
            per_device_train_batch_size=32,
            learning_rate=2e-3,
            max_steps=steps,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = DistillationTrainer(
            model=student,
            teacher=teacher,
            distillation=config,
            args=arguments,
            train_dataset=rows,
            data_collator=collate,
        )
        trainer.log = lambda *_, **__: None
        trainer.train()


def guesses(classifier: Any, rows: list[dict[str, Any]]) -> torch.Tensor:
    """Return the likeliest module of each line."""
    batch = collate(rows)
    with torch.no_grad():
        return classifier.eval()(batch["input_ids"], attention_mask=batch["attention_mask"]).logits.argmax(-1)


def accuracy(classifier: Any, rows: list[dict[str, Any]]) -> float:
    """Return the share of lines that are put into their module."""
    return float((guesses(classifier, rows) == torch.tensor([row["labels"] for row in rows])).float().mean())


def main() -> None:
    """Print the accuracy of teacher and students on lines that none of them saw."""
    rows = lines()
    held_out, seen = rows[:400], rows[400:]
    teacher = model(hidden_size=64, layers=3)
    train(teacher, None, DistillationConfig(alpha=0.0), seen, steps=260)
    guessed = guesses(teacher, seen[FEW:]).tolist()
    unlabelled = [row | {"labels": guess} for row, guess in zip(seen[FEW:], guessed, strict=True)]
    alone, taught = model(hidden_size=32, layers=1), model(hidden_size=32, layers=1)
    train(alone, None, DistillationConfig(alpha=0.0), seen[:FEW], steps=200)
    config = DistillationConfig(alpha=0.9, temperature=2.0, attention=AttentionTerm(weight=0.1))
    train(taught, teacher.eval(), config, seen[:FEW] + unlabelled, steps=200)
    print(f"teacher, {len(seen)} labelled lines           {accuracy(teacher, held_out):.1%}")
    print(f"student, {FEW} labelled lines alone        {accuracy(alone, held_out):.1%}")
    print(f"student, the same and its teacher       {accuracy(taught, held_out):.1%}")


if __name__ == "__main__":
    main()
