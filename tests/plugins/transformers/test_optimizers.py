"""Optimizers that are prepared for an engine, on a single rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from shardwright.plugins.transformers.optimizers import _resumable, prepare_optimizer
from torch import distributed
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

OPTIONS = StateDictOptions(full_state_dict=True)


@pytest.fixture
def one_rank() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def sharded(kind: Any) -> tuple[Any, Any]:
    """Return a model that FSDP2 shards after its optimizer is created, as Accelerate does."""
    model = torch.nn.Linear(4, 4)
    optimizer = kind(model.parameters(), lr=0.1)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer.param_groups[0]["params"] = list(model.parameters())
    return model, optimizer


def step(model: Any, optimizer: Any) -> None:
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [(torch.optim.SGD, AssertionError, "Expected device to be set"), (torch.optim.Adagrad, KeyError, None)],
)
def test_sgd_and_adagrad_resume_under_fsdp2(one_rank: None, kind: Any, error: Any, message: str | None) -> None:
    """A stock optimizer still fails to save or to restore; once it does not, `_resumable` can go."""

    def resumed(kind: Any) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model, optimizer = sharded(kind)
        step(model, optimizer)
        saved = get_optimizer_state_dict(model, optimizer, options=OPTIONS)
        other = kind(model.parameters(), lr=0.2)
        set_optimizer_state_dict(model, other, saved, options=OPTIONS)
        return optimizer, other

    with pytest.raises(error, match=message):
        resumed(kind)
    first, second = resumed(_resumable(kind))
    assert second.param_groups[0]["lr"] == 0.1
    for weight in first.param_groups[0]["params"]:
        for name, value in first.state[weight].items():
            assert torch.equal(torch.as_tensor(second.state[weight][name] - value), torch.zeros_like(value)), name


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adafactor"])
def test_fsdp2_of_a_launcher_prepares_optimizers(optimizer: str) -> None:
    """`accelerate launch` enables FSDP2 without the arguments' `fsdp`."""
    from transformers import Trainer, TrainingArguments

    trainer = SimpleNamespace(
        args=TrainingArguments("unused", optim=optimizer, use_cpu=True, report_to="none"),
        model=torch.nn.Linear(2, 2),
        optimizer=None,
        optimizer_cls_and_kwargs=None,
        is_fsdp_enabled=True,
        is_deepspeed_enabled=False,
        get_optimizer_cls_and_kwargs=Trainer.get_optimizer_cls_and_kwargs,
    )
    prepare_optimizer(trainer)  # type: ignore[arg-type]
    kind, keywords = trainer.optimizer_cls_and_kwargs  # type: ignore[misc]
    assert kind.__name__ in ("Resumable", "ShardedAdafactor")
    assert keywords["lr"] == trainer.args.learning_rate


def test_norms_and_biases_of_deepspeeds_muon_do_not_decay() -> None:
    from accelerate.utils import DummyOptim

    model: Any = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3), torch.nn.Linear(3, 2))
    model[2].requires_grad_(False)
    optimizer, prepared = DummyOptim(model.parameters()), []
    trainer: Any = SimpleNamespace(
        args=SimpleNamespace(optim="muon", optim_args=None),
        model=model,
        optimizer=None,
        optimizer_cls_and_kwargs=None,
        accelerator=Accelerator(cpu=True),
        is_deepspeed_enabled=True,
        is_fsdp_enabled=False,
        get_decay_parameter_names=lambda _: ["0.weight", "2.weight"],
    )
    trainer.accelerator.prepare = lambda *parts: prepared.append(parts)
    prepare_optimizer(trainer)
    trainer.accelerator.prepare("model", optimizer)
    assert prepared == [("model", optimizer)]
    decayed, others = optimizer.params
    assert [id(each) for each in decayed["params"]] == [id(model[0].weight)]
    assert [id(each) for each in others["params"]] == list(map(id, (model[0].bias, *model[1].parameters())))
    assert "weight_decay" not in decayed and others["weight_decay"] == 0.0


def test_transformers_still_has_no_name_for_muon(tmp_path: Path) -> None:
    from transformers.training_args import OptimizerNames

    assert "muon" not in {name.value for name in OptimizerNames}
