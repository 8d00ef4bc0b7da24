"""Rank script: a job of `train`, with the changes of one case."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from cases import all_cases
from shardwright.trainers.rank_main import main
from train_jobs import recorded_losses


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


if __name__ == "__main__":
    case = next(case for case in all_cases() if case.name == sys.argv[3])
    changed = zero_gradient_step if case.zero_gradient_step else kept_products if case.kept_products else nullcontext
    with changed(), recorded_losses(Path(sys.argv[2])):
        assert main(sys.argv[1:2]) == 0, case.name
