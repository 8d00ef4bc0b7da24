"""The moved interval: its rule as properties, and what plans make of it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measuring import LLAMA_8B, measurement_of, plan_on, run_of
from shardwright.cli.show import memory_bar
from shardwright.ds_configs.memory.estimate import RESERVED_OVER_PREDICTED, Calibration, moved_factors
from shardwright.ds_configs.plan.measurement import (
    log_values,
    measured_run,
    measurement_from_text,
    measurement_text,
    report_lines,
)
from shardwright.ds_configs.plan.plan import make_plan
from shardwright.ds_configs.specs.errors import RefusedInputError, UsageError

PUBLISHED = RESERVED_OVER_PREDICTED
RATIO = st.floats(0.5, 2.0)
RATIOS = st.lists(RATIO, min_size=1, max_size=40)
CLOSE = 1e-12


def test_one_run_counts_as_much_as_the_published_interval() -> None:
    # The mean of 1.05 and of 1.007 * 0.95, 1.038 and 1.093 * 1.05.
    assert moved_factors(PUBLISHED, [1.05]) == pytest.approx((1.003325, 1.044, 1.098825))
    # (0.95665 + 2·1.02) / 3, (1.038 + 2·1.03) / 3, (1.14765 + 2·1.04) / 3
    assert moved_factors(PUBLISHED, [1.02, 1.04]) == pytest.approx((0.9988833, 1.0326667, 1.0758833))


@given(ratios=RATIOS)
def test_interval_contains_every_observed_ratio(ratios: list[float]) -> None:
    low, middle, high = moved_factors(PUBLISHED, ratios)
    assert low <= min(ratios) and max(ratios) <= high
    assert low - CLOSE <= middle <= high + CLOSE


def test_plans_report_runs_and_adjust_interval() -> None:
    plain = plan_on(strategy="zero3", micro_batch_size=2, gradient_checkpointing="off")
    runs = tuple(replace(run_of(plain, ratio), identifier=f"{ratio:064f}") for ratio in (1.02, 1.03, 1.04))
    moved = make_plan(plain.model, plain.hardware, plain.job, calibration=Calibration(runs=runs))
    before, after = plain.chosen.memory.gpu, moved.chosen.memory.gpu
    assert (before.calibrated_runs, after.calibrated_runs) == (0, 3)
    assert after.allocated_bytes == before.allocated_bytes
    assert before.low_bytes < after.low_bytes < after.peak_bytes < after.high_bytes < before.high_bytes
    # high: (1.14765 + 3·1.04) / 4 = 1.0669125 of the tensors, where the publication says 1.093 * 1.05 = 1.14765
    assert before.high_bytes - after.high_bytes == pytest.approx(before.allocated_bytes * 0.0807375, rel=1e-3)
    assert sum(after.terms.values()) == after.peak_bytes
    assert "The memory interval comes from 3 measured runs on H100-80GB." in moved.chosen.reason
    assert "measured run" not in plain.chosen.reason
    one = make_plan(plain.model, plain.hardware, plain.job, calibration=Calibration(runs=runs[:1]))
    assert "The memory interval comes from 1 measured run on H100-80GB." in one.chosen.reason


def test_runs_below_prediction_lower_peak_below_tensor_bytes() -> None:
    plain = plan_on()
    moved = make_plan(plain.model, plain.hardware, plain.job, calibration=Calibration(runs=(run_of(plain, 0.8),)))
    gpu = moved.chosen.memory.gpu
    # middle: (1.038 + 0.8) / 2 = 0.919
    assert gpu.terms["allocator_fragmentation"] == pytest.approx(-0.081 * gpu.allocated_bytes, rel=1e-6)
    assert sum(gpu.terms.values()) == gpu.peak_bytes
    assert gpu.low_bytes < gpu.peak_bytes < gpu.high_bytes
    bar = memory_bar(gpu).plain
    assert bar.index("]") == len("[") + 60


def test_a_measurement_survives_its_file() -> None:
    for plan in (plan_on(), plan_on(method="lora", teacher=LLAMA_8B)):
        measurement = measurement_of(plan)
        text = measurement_text(measurement)
        assert measurement_from_text(text.encode(), source="file") == measurement
        assert measured_run(measurement).identifier == measured_run(measurement_of(plan)).identifier
        assert measured_run(measurement).identifier != measured_run(measurement_of(plan, 1.021)).identifier
    assert json.loads(text)["plan"]["job"]["teacher"] == "meta-llama/Llama-3.1-8B"


def test_fullest_rank_and_slowest_step_are_used() -> None:
    plan = plan_on()
    measurement = measurement_of(plan, 1.03)
    run = measured_run(measurement)
    assert run.ratio == pytest.approx(1.03, abs=1e-9)
    assert (run.ranks, run.step_seconds, run.outside_allocator_bytes) == (8, pytest.approx(1.32), 1_100_000_000)
    shown = "\n".join(report_lines(measurement))
    assert "rank 7 of 8, NVIDIA H100 80GB HBM3" in shown and "4, 1.5, then 1.32 (median, slowest rank)" in shown
    values = log_values(measurement)
    assert values["plan/peak_reserved_gb"] == pytest.approx(run.reserved_peak_bytes / 1e9)
    assert values["plan/predicted_allocated_gb"] == pytest.approx(plan.chosen.memory.gpu.allocated_bytes / 1e9)
    assert values["plan/step_seconds"] == pytest.approx(1.32)
    assert all(isinstance(value, float) for value in values.values())


def change_rank(**values: Any) -> Any:
    return lambda data: data["measured"][0].update(values)


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        (lambda data: data.update(schema_version=2), ["schema_version = 2: this version reads 1"]),
        (lambda data: data["measured"].pop(0), ["must list each rank once, in order"]),
        (lambda data: data["predicted"].update(allocated_bytes=0), ["predicted.allocated_bytes = 0"]),
        (lambda data: data["plan"].pop("architecture"), ["plan.architecture: field required"]),
        (change_rank(peak_reserved_bytes=-1, steps=1.5), ["measured.0.peak_reserved_bytes = -1", "measured.0.steps"]),
        (change_rank(median_step_seconds=float("nan")), ["NaN is not a finite number"]),
    ],
)
def test_damaged_measurements_are_rejected_with_all_errors(change: Any, messages: list[str]) -> None:
    data = json.loads(measurement_text(measurement_of(plan_on())))
    change(data)
    with pytest.raises(RefusedInputError) as refused:
        measurement_from_text(json.dumps(data).encode(), source="file")
    assert len(refused.value.errors) == len(messages)
    assert all(message in str(refused.value) for message in messages)


def test_runs_unusable_for_calibration_are_rejected() -> None:
    plan = plan_on()
    on_cpu = replace(
        measurement_of(plan).measured[0], device="cpu", peak_allocated_bytes=None, peak_reserved_bytes=None
    )
    measurement = measurement_of(plan)
    with pytest.raises(UsageError, match="had no accelerator"):
        measured_run(replace(measurement, measured=(on_cpu, *measurement.measured[1:])))
    with pytest.raises(UsageError, match="run: ranks was 4") as refused:
        measured_run(replace(measurement, differences=("ranks was 4, but the plan has 8", "optim was sgd")))
    assert len(refused.value.errors) == 2
    for ratio in (0.3, 2.5):
        with pytest.raises(UsageError, match=r"must be from 0\.5 to 2\.0"):
            run_of(plan, ratio)
