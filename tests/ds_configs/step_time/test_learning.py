"""Measured steps correct the predicted time of later plans."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning import public_model
from shardwright.ds_configs.plan.plan import make_plan, plan_from_dict, plan_to_dict
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob
from shardwright.ds_configs.step_time.estimate import StepTime
from shardwright.ds_configs.step_time.learning import (
    PARTS,
    MeasuredStep,
    corrected_time,
    learned,
    learned_factors,
    part_seconds,
    published_time,
    separated_factors,
)

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


def run_with(shares: dict[str, float], factors: dict[str, float], index: int, error: float = 0.0) -> MeasuredStep:
    """Return a run whose parts took `factors` times as long as predicted."""
    measured = sum(shares[part] * factors[part] for part in PARTS) * (1 + error)
    parts = {"network_seconds": shares["network"], "host_seconds": shares["host"]}
    return replace(run(measured, identifier=f"{index:064d}"), **parts)


_FACTORS = st.fixed_dictionaries({part: st.floats(0.4, 4.0) for part in PARTS})
_NOISE = st.lists(st.floats(-0.01, 0.01), min_size=8, max_size=8)
_SPREAD_SHARES = [
    {"compute": 1 - network - host, "network": network, "host": host}
    for network, host in ((0, 0), (0.6, 0), (0.1, 0.5), (0.3, 0.3), (0.5, 0.1), (0, 0.4), (0.2, 0.2), (0.7, 0.1))
]


@given(factors=_FACTORS, noise=_NOISE)
def test_known_factors_of_the_parts_are_recovered(factors: dict[str, float], noise: list[float]) -> None:
    runs = [run_with(shares, factors, i, noise[i]) for i, shares in enumerate(_SPREAD_SHARES)]
    fitted = separated_factors(runs)
    if fitted is None:
        # A part that takes little of every measured step is uncertain.
        assert min(factors.values()) < 0.35 * max(factors.values())
        return
    if len(set(fitted.values())) == len(PARTS):
        assert fitted == {part: pytest.approx(value, rel=0.25) for part, value in factors.items()}
    # Two parts with a common factor may miss a run, but all runs together are nearer than with any single scale.
    ratios = np.array([step.ratio for step in runs])
    parts = np.array([[shares[part] for part in PARTS] for shares in _SPREAD_SHARES])
    separated = parts @ [fitted[part] for part in PARTS] / ratios
    single = 1 / ratios * (1 / ratios).sum() / (1 / ratios**2).sum()
    assert ((separated - 1) ** 2).sum() <= ((single - 1) ** 2).sum() + 1e-12


@given(factors=_FACTORS, network=st.floats(0, 0.6), noise=_NOISE, count=st.integers(1, 8))
def test_runs_with_similar_shares_have_one_scale(
    factors: dict[str, float], network: float, noise: list[float], count: int
) -> None:
    shares = {"compute": 0.9 - network, "network": network, "host": 0.1}
    runs = [run_with(shares, factors, index, noise[index]) for index in range(count)]
    assert separated_factors(runs) is None
    time = corrected(*runs)
    assert not time.learned_factors and set(learned_factors(time).values()) == {time.learned_scale}
    assert time.terms["a"] / time.terms["b"] == pytest.approx(TIME.terms["a"] / TIME.terms["b"])


def test_a_slow_network_moves_the_layouts_that_use_it() -> None:
    """Runs without and with communication, whose network is three times as slow as published."""
    factors = {"compute": 1.0, "network": 3.0, "host": 1.0}
    runs = [
        run_with({"compute": 1 - share, "network": share, "host": 0.0}, factors, index)
        for index, share in enumerate((0.0, 0.1, 0.3, 0.5, 0.6))
    ]
    busy = replace(TIME, terms={"matrix_products": 0.4, "gradient_reduction": 1.6})
    alone = replace(TIME, terms={"matrix_products": 2.0})
    known = learned(tuple(runs), HARDWARE, "deepspeed")
    assert known is not None and known.separates and known.ratios == pytest.approx([1.0] * 5)
    times = [corrected_time(time, tuple(runs), hardware=HARDWARE, engine="deepspeed") for time in (busy, alone)]
    assert [time.seconds for time in times] == pytest.approx([0.4 + 3 * 1.6, 2.0])
    assert part_seconds(times[0]) == pytest.approx({"compute": 0.4, "network": 4.8, "host": 0.0})
    # The interval narrows as with one scale, and the published prediction can be had back.
    for time, before in zip(times, (busy, alone), strict=True):
        assert time.high_seconds / time.low_seconds < TIME.high_seconds / TIME.low_seconds
        back = published_time(time)
        assert back.seconds == pytest.approx(before.seconds) and back.terms == pytest.approx(before.terms)
        assert not back.learned_factors and back.learned_scale == pytest.approx(1.0)


def test_a_plan_keeps_the_runs_that_corrected_it() -> None:
    model = public_model("meta-llama/Llama-3.1-8B")
    engine = make_plan(model, HARDWARE, TrainingJob()).chosen.strategy.engine
    factors = {"compute": 1.2, "network": 3.0, "host": 1.0}
    runs = tuple(
        replace(
            run_with({"compute": 1 - share, "network": share, "host": 0.0}, factors, index), engine=engine, release="1"
        )
        for index, share in enumerate((0.0, 0.1, 0.3, 0.5, 0.6))
    )
    plan = make_plan(model, HARDWARE, TrainingJob(), measured_steps=runs)
    assert plan.learned_from == runs and plan.chosen.time.learned_factors
    assert "for communication" in plan.chosen.reason
    assert plan_from_dict(plan_to_dict(plan), source="plan.json") == plan
