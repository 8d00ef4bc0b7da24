"""What Transformers does with a model that an evaluation or an earlier training run has prepared."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import Trainer, TrainingArguments


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
