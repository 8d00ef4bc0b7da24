"""Rank script: train one case through the entry point."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from cases import SEQ_LEN, Case, all_cases
from shardwright.trainers.train_causal_lm import main


@contextmanager
def zero_gradient_step() -> Iterator[None]:
    from transformers import Trainer

    create = Trainer.create_optimizer

    def create_and_step(trainer: Any, model: Any = None) -> Any:
        optimizer = create(trainer, model)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.new_zeros(parameter.shape)
        optimizer.step()
        optimizer.zero_grad()
        return optimizer

    with patch.object(Trainer, "create_optimizer", create_and_step):
        yield


@contextmanager
def kept_products() -> Iterator[None]:
    from shardwright.plugins.transformers.gradient_checkpointing import selective_checkpointing_callback
    from transformers import Trainer

    train = Trainer.train

    def train_keeping(trainer: Any, *arguments: Any, **options: Any) -> Any:
        trainer.add_callback(selective_checkpointing_callback())
        return train(trainer, *arguments, **options)

    with patch.object(Trainer, "train", train_keeping):
        yield


def train(case: Case, model_directory: Path, output: Path) -> None:
    settings = output / f"{case.name}-rank{os.environ['RANK']}.arguments.json"
    settings.write_text(json.dumps(case.training_arguments()))
    arguments = [
        *("--model", str(model_directory), "--training-arguments", str(settings)),
        *("--text", __file__, "--seq-len", str(SEQ_LEN), "--output-dir", str(output / case.name), "--no-save"),
        *("--losses-json", str(output / f"{case.name}.json")),
    ]
    changed = zero_gradient_step if case.zero_gradient_step else kept_products if case.kept_products else nullcontext
    with changed():
        assert main(arguments) == 0, case.name


if __name__ == "__main__":
    chosen = next(case for case in all_cases() if case.name == sys.argv[3])
    train(chosen, Path(sys.argv[1]), Path(sys.argv[2]))
