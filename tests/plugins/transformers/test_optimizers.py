"""Optimizers that are prepared for an engine, on a single rank, and those of scripts that an engine can train with."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from shardwright.plugins.transformers.optimizers import (
    _resumable,
    model_errors,
    optimizer_class_errors,
    optimizer_errors,
    prepare_optimizer,
)
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


# Optimizers of scripts.


ZERO = ("zero2",)


class TrustRatio(torch.optim.Optimizer):
    """Scales each step by the norm of the whole matrix, as LAMB does."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.sub_(each.grad * group["lr"] * each.norm() / each.grad.norm())


class OfElements(TrustRatio):
    """Steps each element by itself, with a count that no group has."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.steps = 0

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            for each in group["params"]:
                each.sub_(each.grad.sign() * group["lr"] / self.steps)


def arguments(**configuration: Any) -> Any:
    """Return what is read of `TrainingArguments` with a DeepSpeed configuration."""
    plugin = SimpleNamespace(deepspeed_config=configuration)
    return SimpleNamespace(deepspeed_plugin=plugin, device=torch.device("cpu"))


def model() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))


def rules(optimizer: Any, scheduler: Any = None, /, **configuration: Any) -> list[str]:
    """Return what is wrong with an optimizer under ZeRO-2."""
    return [error.rule for error in optimizer_errors(optimizer, scheduler, arguments(**configuration), ZERO)]


@pytest.mark.parametrize(
    "kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.NAdam, torch.optim.Adamax, torch.optim.RMSprop, OfElements]
)
def test_optimizers_that_step_elements_by_themselves_are_accepted(kind: Any) -> None:
    optimizer = kind(model().parameters())
    assert rules(optimizer) == []
    assert not optimizer.state and getattr(optimizer, "steps", 0) == 0


def test_optimizers_that_read_the_shape_of_matrices_are_rejected() -> None:
    from transformers.optimization import Adafactor

    for optimizer in (TrustRatio(model().parameters()), Adafactor(model().parameters(), lr=1e-3, relative_step=False)):
        assert any("reads the shape of matrices" in rule for rule in rules(optimizer))
    muon = torch.optim.Muon([model()[0].weight])
    assert any("flat pieces" in rule for rule in rules(muon))
    assert any("takes no arguments" not in rule for rule in rules(torch.optim.LBFGS(model().parameters())))


def test_states_sections_and_schedulers_that_would_be_dropped_are_rejected() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    other = torch.optim.lr_scheduler.StepLR(torch.optim.AdamW(net.parameters()), 1)
    assert "has a scheduler of another optimizer" in rules(optimizer, other)
    assert "without its optimizer" in rules(None, other)[0]
    assert "optimizer of the DeepSpeed configuration" in rules(optimizer, optimizer={"type": "AdamW"})[0]
    own = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert "scheduler of the DeepSpeed configuration" in rules(optimizer, own, scheduler={"type": "WarmupLR"})[0]
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert "already has states" in rules(optimizer)[0]
    assert "already has states" in rules(torch.optim.Adagrad(net.parameters()))[0]
    assert optimizer_errors(optimizer, None, arguments(), ("ddp",)) == []


def test_an_offloaded_optimizer_is_adamw_or_rejected() -> None:
    offloaded = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    parameters = list(model().parameters())
    assert rules(torch.optim.AdamW(parameters), **offloaded) == []
    for optimizer in (torch.optim.SGD(parameters), torch.optim.AdamW(parameters, amsgrad=True)):
        assert "replaced by DeepSpeed's CPU Adam" in rules(optimizer, **offloaded)[0]
        assert rules(optimizer, **offloaded, zero_force_ds_cpu_optimizer=False) == []


def test_classes_are_tried_before_a_model_is_divided() -> None:
    def found(kind: Any, **keywords: Any) -> list[str]:
        return [error.rule for error in optimizer_class_errors((kind, keywords), arguments(), ZERO)]

    assert found(torch.optim.AdamW, lr=1e-3) == []
    assert "reads the shape" in found(TrustRatio)[0]
    assert "before the engine" in found(torch.optim.Adagrad)[0]
    assert "unexpected keyword argument 'learning_rate'" in found(torch.optim.SGD, learning_rate=1)[0]


def test_parameters_of_another_model_and_forgotten_ones_are_rejected() -> None:
    net, other = model(), model()

    def found(parameters: Any, columns: tuple[str, ...] = ZERO) -> str:
        return " ".join(error.rule for error in model_errors(torch.optim.SGD(parameters, lr=1.0), net, columns))

    assert found(net.parameters()) == ""
    assert "no trainable parameter of the model" in found(other.parameters(), ())
    assert "not the model's" in found([*net.parameters(), *other.parameters()])
    assert "lacks 1.weight" in found(net[0].parameters())
    assert found(net[0].parameters(), ("fsdp2",)) == found(net[0].parameters(), ("ddp",)) == ""


def test_the_trainer_still_drops_optimizers_under_deepspeed() -> None:
    from transformers import Trainer
    from transformers.integrations.deepspeed import deepspeed_init

    assert "trainer.optimizer = None" in inspect.getsource(deepspeed_init)
    assert "is not allowed if PyTorch FSDP is enabled" in inspect.getsource(Trainer)
