"""What Transformers does with length groups, and with a model that an evaluation or an earlier run has prepared.

A Trainer has one guard and one keeper of checkpoints, because a second one would replace the hooks of the first.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.trainers.checkpoint_callback import CheckpointCallback
from shardwright.trainers.guards import GuardCallback
from transformers import Trainer, TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler


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


def test_stock_ranks_draw_orders_of_their_own(tmp_path: Path) -> None:
    """The order comes from the random numbers of the process: `ExactTrainer._get_train_sampler` is needed."""
    rows: list[dict[str, Any]] = [{"input_ids": [1] * (1 + index % 7)} for index in range(32)]
    arguments = TrainingArguments(
        str(tmp_path), use_cpu=True, train_sampling_strategy="group_by_length", report_to="none"
    )
    trainer = Trainer(torch.nn.Linear(1, 1), arguments, train_dataset=rows)
    sampler = trainer._get_train_sampler()
    assert isinstance(sampler, LengthGroupedSampler)
    orders = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        orders.append(list(sampler))
    assert orders[0] == orders[1] != orders[2]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.weight - labels).square().mean()}


def trainer_of(directory: Path) -> Trainer:
    arguments = TrainingArguments(str(directory), use_cpu=True, report_to="none", max_steps=1)
    rows: Any = [{"labels": 0}, {"labels": 2}]
    return Trainer(Model(), arguments, train_dataset=rows, eval_dataset=rows)


def test_the_trainer_still_evaluates_first_without_an_optimizer(tmp_path: Path) -> None:
    # One process, where the evaluation is upstream's.
    trainer = trainer_of(tmp_path)
    trainer.evaluate()
    assert trainer.optimizer is None
    # This mark makes Accelerate return the model to `train` without DDP.
    assert trainer.accelerator.prepare_model(trainer.model) is trainer.model
    assert len(trainer.accelerator._models) == 1


def test_the_trainer_still_destroys_the_engine_of_its_first_run(tmp_path: Path) -> None:
    trainer, destroyed = trainer_of(tmp_path), []
    engine = SimpleNamespace(destroy=lambda: destroyed.append("engine"))
    trainer.accelerator.deepspeed_engine_wrapped = SimpleNamespace(engine=engine)
    trainer.train()
    assert destroyed == ["engine"]


def test_transformers_still_discards_the_optimizer_of_an_engine() -> None:
    from transformers.integrations.deepspeed import deepspeed_init

    config = SimpleNamespace(config={}, trainer_config_finalize=lambda *_: None, is_offload=lambda: False)
    trainer: Any = SimpleNamespace(
        model=Model(),
        args=SimpleNamespace(get_process_log_level=lambda: 30),
        accelerator=SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=SimpleNamespace(hf_ds_config=config))),
        optimizer="of the engine",
    )
    trainer.create_optimizer = lambda: trainer.optimizer or "another"
    assert deepspeed_init(trainer, 1) == ("another", None)
