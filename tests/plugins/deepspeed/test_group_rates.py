"""Schedulers of a DeepSpeed configuration, and optimizers whose groups have several rates."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shardwright.ds_configs.specs.errors import UsageError
from shardwright.plugins import patches
from shardwright.plugins.deepspeed.engine import refuse_overwritten_rates

LORA_PLUS, LAYERWISE, MUON = (1e-4, 16e-4), (1e-5, 2e-5, 4e-5, 8e-5), (2e-2, 1e-5)
OVERWRITING: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_max_lr": 1e-3, "warmup_num_steps": 2},
    "WarmupDecayLR": {"total_num_steps": 9, "warmup_num_steps": 2},
    "OneCycle": {"cycle_min_lr": 0.0, "cycle_max_lr": 1e-3, "cycle_momentum": False},
    "LRRangeTest": {},
}


def engine(rates: tuple[float, ...], scheduler: str | None, **params: Any) -> Any:
    """Return what DeepSpeed's engine has when it makes its scheduler."""
    from deepspeed.runtime import lr_schedules

    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": rate} for rate in rates]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    return SimpleNamespace(
        optimizer=optimizer,
        client_lr_scheduler=None,
        scheduler_name=lambda: scheduler,
        _scheduler_from_config=lambda _: scheduler and getattr(lr_schedules, scheduler)(optimizer, **params),
    )


def rates_after_warmup(made: Any) -> list[float]:
    for _ in range(4):
        made.optimizer.step()
        made.lr_scheduler.step()
    return [group["lr"] for group in made.optimizer.param_groups]


@pytest.fixture
def refusing() -> Iterator[Any]:
    from deepspeed.runtime.engine import DeepSpeedEngine

    refuse_overwritten_rates()
    yield DeepSpeedEngine._configure_lr_scheduler
    patches.remove("rates-of-groups")


@pytest.mark.parametrize("scheduler", OVERWRITING)
def test_deepspeed_still_overwrites_the_rates_of_groups(scheduler: str) -> None:
    (patch,) = [each for each in patches.PATCHES if each.name == "rates-of-groups"]
    made = engine(MUON, scheduler, **OVERWRITING[scheduler])
    patches.upstream_value(patch)(made)
    assert len(set(rates_after_warmup(made))) == 1


@pytest.mark.parametrize("scheduler", OVERWRITING)
@pytest.mark.parametrize("rates", [LORA_PLUS, LAYERWISE, MUON])
def test_one_rate_for_groups_of_several_is_an_error(refusing: Any, rates: tuple[float, ...], scheduler: str) -> None:
    with pytest.raises(UsageError, match=f"{scheduler} would replace the rates of {len(rates)} groups"):
        refusing(engine(rates, scheduler, **OVERWRITING[scheduler]))
    refusing(engine(rates[:1] * 2, scheduler, **OVERWRITING[scheduler]))


def test_schedulers_that_keep_the_rates_of_groups_are_accepted(refusing: Any) -> None:
    for scheduler, params in (
        ("WarmupLR", {"warmup_num_steps": 2}),
        ("WarmupLR", {"warmup_num_steps": 2, "warmup_max_lr": list(LORA_PLUS)}),
        ("WarmupDecayLR", {"total_num_steps": 9, "warmup_num_steps": 2, "warmup_max_lr": None}),
        ("WarmupCosineLR", {"total_num_steps": 9, "warmup_num_steps": 2}),
        ("OneCycle", {"cycle_min_lr": 0.0, "cycle_max_lr": list(LORA_PLUS), "cycle_momentum": False}),
    ):
        made = engine(LORA_PLUS, scheduler, **params)
        refusing(made)
        low, high = rates_after_warmup(made)
        assert high / low == pytest.approx(16, rel=1e-6), scheduler
    refusing(engine(LORA_PLUS, None))
