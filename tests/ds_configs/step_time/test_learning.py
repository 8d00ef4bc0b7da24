"""Measured steps correct the predicted time of later plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planning import public_model
from shardwright.ds_configs.plan.plan import make_plan, plan_from_dict, plan_to_dict
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.step_time.estimate import StepTime
from shardwright.ds_configs.step_time.learning import MeasuredStep, corrected_time, published_time

TIME = StepTime(seconds=2.0, low_seconds=1.6, high_seconds=2.5, tokens_per_second=100.0, terms={"a": 1.5, "b": 0.5})

HARDWARE = parse_hardware("8xA100-80GB")


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
    return corrected_time(TIME, runs, hardware=HARDWARE, engine=engine)


def test_without_runs_of_the_accelerator_nothing_changes() -> None:
    assert corrected() is TIME
    assert corrected(run(3.0, gpu="H100-80GB")) is TIME


def test_one_run_counts_as_much_as_the_published_prediction() -> None:
    time = corrected(run(3.0))
    assert time.seconds == pytest.approx(4.0) and time.tokens_per_second == pytest.approx(50.0)
    assert sum(time.terms.values()) == pytest.approx(time.seconds)
    assert time.low_seconds <= time.seconds <= time.high_seconds and time.high_seconds >= 6.0
    assert (time.learned_scale, time.measured_runs) == (pytest.approx(2.0), 1)


def test_an_engine_is_not_preferred_because_it_was_never_measured() -> None:
    time = corrected(run(3.0), engine="fsdp2")
    assert time.seconds == corrected(run(3.0)).seconds
    assert time.high_seconds / time.low_seconds == pytest.approx(TIME.high_seconds / TIME.low_seconds)
    assert corrected(run(3.0), run(1.0, engine="fsdp2"), engine="fsdp2").seconds == pytest.approx(2.0)


def test_runs_of_a_plan_with_other_rates_do_not_correct() -> None:
    own, other = (replace(run(3.0), flops_per_s=rate) for rate in (HARDWARE.flops_per_s, 1e12))
    assert corrected(other) is TIME
    assert corrected(own, other).measured_runs == corrected(own).measured_runs == 1


def test_published_prediction_is_restored_exactly() -> None:
    back = published_time(corrected(run(3.0), run(2.5)))
    assert back.seconds == pytest.approx(TIME.seconds) and back.terms == pytest.approx(TIME.terms)
    assert back.learned_scale == pytest.approx(1.0)


def test_a_plan_keeps_the_runs_that_corrected_it() -> None:
    model = public_model("meta-llama/Llama-3.1-8B")
    engine = make_plan(model, HARDWARE, TrainingJob()).chosen.layout.engine
    runs = tuple(replace(run(ratio), engine=engine, release="1") for ratio in (1.2, 1.4))
    plan = make_plan(model, HARDWARE, TrainingJob(), measured_steps=runs)
    assert plan.learned_from == runs and "Step times are 1.20 times the published" in plan.chosen.reason
    assert plan_from_dict(plan_to_dict(plan), source="plan.json") == plan
