"""A Trainer has one guard and one keeper of checkpoints: a second one would replace the hooks of the first."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.trainers.checkpoints.callback import CheckpointCallback
from shardwright.trainers.guards import GuardCallback
from transformers import Trainer, TrainingArguments


@pytest.mark.parametrize("kind", [GuardCallback, CheckpointCallback])
def test_a_second_callback_of_a_kind_is_rejected(kind: type, tmp_path: Path) -> None:
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    trainer = Trainer(model=torch.nn.Linear(2, 2), args=arguments)
    kind().attach(trainer)
    with pytest.raises(UsageError) as error:
        kind().attach(trainer)
    assert str(error.value).startswith(f"{kind.__name__}: is already attached to this trainer")
    trainer.remove_callback(kind)
    kind().attach(trainer)
