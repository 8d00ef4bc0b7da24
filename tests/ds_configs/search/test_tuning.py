"""Which layouts `tune` measures, when a trial ends early, and the plan of the fastest one."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from statistics import median
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from planning import public_model
from shardwright.ds_configs.plan.plan import Plan, make_plan, plan_from_dict, plan_to_dict, tuned_plan
from shardwright.ds_configs.search.search import Evaluated
from shardwright.ds_configs.search.tuning import (
    Trial,
    cannot_win,
    layouts_to_measure,
    measured,
    with_other_micro_batch,
)
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob

TIMES = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=9)


@cache
def planned() -> Plan:
    return make_plan(public_model("Qwen/Qwen2.5-0.5B"), parse_hardware("8xA100-80GB"), TrainingJob())


def with_speed(layout: Evaluated, tokens_per_second: float) -> Evaluated:
    return replace(layout, time=replace(layout.time, tokens_per_second=tokens_per_second))


def trial(candidate: Evaluated, seconds: float | None, **values: Any) -> Trial:
    facts: dict[str, Any] = {"outcome": "measured", "spread": 0.01, "steps": 5, "peak_allocated_bytes": 10**9} | values
    return Trial(
        layout=candidate.layout,
        loss=candidate.loss,
        predicted_seconds=candidate.time.seconds,
        predicted_allocated_bytes=candidate.memory.gpu.allocated_bytes,
        step_seconds=seconds,
        **facts,
    )


@given(st.data(), st.integers(1, 6))
def test_measured_layouts_begin_with_the_chosen_one_and_are_near_the_fastest(data: st.DataObject, trials: int) -> None:
    plan = planned()
    speeds = data.draw(st.lists(st.floats(50, 150), min_size=len(plan.rejected), max_size=len(plan.rejected)))
    rejected = [with_speed(other, speed) for other, speed in zip(plan.rejected, speeds, strict=True)]
    chosen = with_speed(plan.chosen, 100.0)
    layouts = layouts_to_measure(chosen, rejected, trials=trials)
    assert layouts[0] is chosen and len(layouts) <= trials
    runnable = [other for other in rejected if other.memory.fits and other.layout.pp == 1]
    fastest = max(layout.time.tokens_per_second for layout in (chosen, *runnable))
    for layout in layouts[1:]:
        assert any(layout is other for other in runnable)
        assert layout.time.tokens_per_second * 1.2 >= fastest


def test_another_micro_batch_keeps_layout_and_global_batch_and_fits() -> None:
    plan = planned()
    layout = plan.chosen.layout
    other = with_other_micro_batch(plan.chosen, plan.model, plan.hardware, plan.job)
    assert other is not None and other.memory.fits
    sizes = {"micro_batch_size": layout.micro_batch_size, "gradient_accumulation_steps": 1}
    assert replace(other.layout, **sizes) == replace(layout, **sizes)
    assert other.layout.global_batch_size == layout.global_batch_size
    assert other.layout.micro_batch_size / layout.micro_batch_size in (0.5, 2)
    requested = replace(plan.job, micro_batch_size=layout.micro_batch_size)
    assert with_other_micro_batch(plan.chosen, plan.model, plan.hardware, requested) is None
    tuned = tuned_plan(replace(plan, rejected=(*plan.rejected, other)), (trial(plan.chosen, 1.2), trial(other, 1.0)))
    assert f"% faster than with micro-batch {layout.micro_batch_size}." in tuned.chosen.reason
    assert f"with micro-batch {layout.micro_batch_size} is measured" in tuned.rejected[0].reason


@given(TIMES, TIMES, st.floats(0.1, 10.0))
def test_a_trial_ends_early_only_if_its_median_cannot_win(begun: list[float], rest: list[float], best: float) -> None:
    if cannot_win(begun, steps=len(begun) + len(rest), best_seconds=best):
        assert median([*begun, *rest]) >= best
        assert median([*begun, *[0.0] * len(rest)]) >= best or len(begun) <= len(rest)


@given(st.lists(st.one_of(st.none(), st.floats(0.1, 10.0)), min_size=1, max_size=5))
def test_the_kept_layout_is_never_slower_than_the_first_one(seconds: list[float | None]) -> None:
    plan = planned()
    layouts = (plan.chosen, *plan.rejected)[: len(seconds)]
    trials = tuple(
        trial(layout, time, outcome="measured" if time is not None else "out of memory")
        for layout, time in zip(layouts, seconds, strict=False)
    )
    if not measured(trials):
        return
    tuned = tuned_plan(plan, trials)
    best = next(one for one in trials if one.key == (tuned.chosen.layout, tuned.chosen.loss))
    assert best.step_seconds == min(one.step_seconds for one in trials if one.step_seconds is not None)
    assert {candidate.layout for candidate in (tuned.chosen, *tuned.rejected)} == {
        candidate.layout for candidate in (plan.chosen, *plan.rejected)
    }


def test_a_tuned_plan_has_measured_times_beside_predicted_ones_and_is_read_back() -> None:
    plan = planned()
    other = plan.rejected[0]
    trials = (
        trial(plan.chosen, 1.041),
        trial(other, 1.0),
        trial(plan.rejected[1], None, outcome="out of memory", detail="rank 0: out of memory in phase backward"),
    )
    tuned = tuned_plan(plan, trials)
    assert tuned.chosen.layout == other.layout
    assert "is measured 4.1 % faster than" in tuned.chosen.reason
    assert f"{other.time.seconds:,.3g} s predicted" in tuned.chosen.reason
    reasons = {candidate.layout: candidate.reason for candidate in tuned.rejected}
    assert "is measured 4.1 % slower" in reasons[plan.chosen.layout]
    assert "out of memory in phase backward" in reasons[plan.rejected[1].layout]
    read = plan_from_dict(plan_to_dict(tuned), source="test")
    assert read.trials == trials and read.chosen == tuned.chosen
    assert "trials" not in plan_to_dict(plan)


def test_a_gain_within_the_noise_is_called_uncertain() -> None:
    plan = planned()
    trials = (trial(plan.chosen, 1.0, spread=0.3), trial(plan.rejected[0], 1.02))
    assert "vary by 30 %, so the two may be equally fast" in tuned_plan(plan, trials).chosen.reason
    assert "equally fast" not in tuned_plan(plan, (trial(plan.chosen, 1.0), trials[1])).chosen.reason
