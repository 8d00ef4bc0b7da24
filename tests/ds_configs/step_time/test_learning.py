"""Measured steps correct the predicted time of later plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planning import public_model
from shardwright.ds_configs.plan.plan import make_plan, plan_from_dict, plan_to_dict
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.step_time.estimate import StepTime
from shardwright.ds_configs.step_time.learning import MeasuredStep, corrected_time

TIME = StepTime(seconds=2.0, low_seconds=1.6, high_seconds=2.5, tokens_per_second=100.0, terms={"a": 1.5, "b": 0.5})


def run(ratio: float, *, gpu: str = "A100-80GB", engine: str = "deepspeed", identifier: str = "a" * 64) -> MeasuredStep:
    return MeasuredStep(
        identifier=identifier,
        gpu=gpu,
        engine=engine,
        model="model",
        layout="zero2",
        ranks=8,
        predicted_seconds=1.0,
        measured_seconds=ratio,
    )


def corrected(*runs: MeasuredStep, engine: str = "deepspeed") -> StepTime:
    return corrected_time(TIME, runs, gpu="A100-80GB", engine=engine)


def test_without_runs_of_the_accelerator_nothing_changes() -> None:
    assert corrected() is TIME
    assert corrected(run(3.0, gpu="H100-80GB")) is TIME


def test_one_run_counts_as_much_as_the_published_prediction() -> None:
    time = corrected(run(3.0))
    assert time.seconds == pytest.approx(4.0) and time.tokens_per_second == pytest.approx(50.0)
    assert sum(time.terms.values()) == pytest.approx(time.seconds)
    assert time.low_seconds <= time.seconds <= time.high_seconds and time.high_seconds >= 6.0
    assert (time.learned_scale, time.measured_runs) == (pytest.approx(2.0), 1)


def test_five_runs_narrow_the_interval() -> None:
    published = (TIME.high_seconds - TIME.low_seconds) / TIME.seconds
    widths = []
    for count in (1, 5):
        time = corrected(*[run(1.0, identifier=f"{index:064d}") for index in range(count)])
        widths.append((time.high_seconds - time.low_seconds) / time.seconds)
    assert published > widths[0] > 2 * widths[1]


def test_an_engine_is_not_preferred_because_it_was_never_measured() -> None:
    time = corrected(run(3.0), engine="fsdp2")
    assert time.seconds == corrected(run(3.0)).seconds
    assert time.high_seconds / time.low_seconds == pytest.approx(TIME.high_seconds / TIME.low_seconds)
    assert corrected(run(3.0), run(1.0, engine="fsdp2"), engine="fsdp2").seconds == pytest.approx(2.0)


def test_a_slow_run_moves_the_next_plan_and_is_named_in_its_reason() -> None:
    model, hardware = public_model("Qwen/Qwen2.5-0.5B"), parse_hardware("8xA100-80GB")
    before = make_plan(model, hardware, TrainingJob())
    slow = run(3.0, engine=before.chosen.strategy.engine)
    after = make_plan(model, hardware, TrainingJob(), measured_steps=(slow,))
    assert after.chosen.time.seconds == pytest.approx(2 * before.chosen.time.seconds)
    assert "2.00 times the published prediction, from 1 measured run on A100-80GB" in after.chosen.reason
    assert [offer.times_faster for offer in after.offers] == [offer.times_faster for offer in before.offers]
    assert plan_from_dict(plan_to_dict(after), source="test").chosen.time == after.chosen.time
    assert "measured_runs" not in plan_to_dict(before)["chosen"]["step_time"]
    assert replace(after.chosen.time, measured_runs=0, learned_scale=1.0) != before.chosen.time
