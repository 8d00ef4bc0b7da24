"""Numbers of the charts: sums of every gallery plan, and axes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shardwright.cli.page.charts import (
    decade_numbers,
    layout_chart,
    phases_chart,
    round_numbers,
    shown_layout,
    time_rows,
)
from shardwright.ds_configs.plan.gallery import GALLERY, gallery_entry, gallery_plan


@pytest.mark.parametrize("name", [entry.name for entry in GALLERY])
def test_stacks_add_up_to_the_memory_of_the_plan(name):
    plan = gallery_plan(gallery_entry(name))
    chart, gpu = phases_chart(plan), plan.chosen.memory.gpu
    assert chart.total(chart.peak) == pytest.approx(gpu.peak_bytes, abs=1)
    assert set(chart.phases) == set(gpu.phases)
    overheads = {"allocator fragmentation", "runtime context", "communicators"}
    for phase, tensors in gpu.phases.items():
        assert sum(term.bytes_of[phase] for term in chart.terms if term.name not in overheads) == tensors
    widest = max(chart.place(chart.total(phase)) for phase in chart.phases)
    assert max(widest, chart.place(gpu.capacity_bytes), chart.place(gpu.high_bytes)) < 100
    assert all(0 <= tick.place <= 100 for tick in chart.ticks) and len(chart.ticks) >= 3
    rows = time_rows(plan.chosen.time)
    assert math.fsum(row.seconds for row in rows) == pytest.approx(plan.chosen.time.seconds)
    assert rows[0].width == pytest.approx(100) and math.fsum(row.share for row in rows) == pytest.approx(100)
    assert all(term.meaning for term in chart.terms) and all(row.meaning for row in rows)


@pytest.mark.parametrize("name", [entry.name for entry in GALLERY])
def test_every_candidate_has_a_mark_at_its_memory_and_speed(name):
    plan = gallery_plan(gallery_entry(name))
    layouts = [shown_layout(plan.chosen, chosen=True), *map(shown_layout, plan.rejected)]
    chart = layout_chart(layouts, plan.pareto, capacity_bytes=plan.hardware.gpu_bytes)
    assert len(chart.marks) == len(layouts) and chart.marks[-1].kind == "chosen"
    assert all(0 < mark.x < 100 and 0 < mark.y < 100 for mark in (*chart.marks, *chart.frontier))
    for mark in chart.marks:
        if mark.kind in ("chosen", "fits"):
            assert mark.x <= chart.capacity
    heights = [mark.y for mark in chart.frontier]
    assert heights == sorted(heights)
    assert len(chart.x_ticks) >= 2 and len(chart.y_ticks) >= 2


def test_a_negative_allocator_term_has_no_width():
    plan = gallery_plan(gallery_entry("llama-3.1-8b_8xA100-80GB"))
    gpu = plan.chosen.memory.gpu
    moved = replace(gpu, terms=gpu.terms | {"allocator_fragmentation": -5 * 10**8})
    memory = replace(plan.chosen.memory, gpu=moved)
    chart = phases_chart(replace(plan, chosen=replace(plan.chosen, memory=memory)))
    (term,) = (term for term in chart.terms if term.name == "allocator fragmentation")
    assert chart.place(term.bytes_of[chart.peak]) == 0


@given(st.floats(1e-6, 1e12))
def test_round_numbers_begin_at_zero_and_stay_below_the_end(end):
    numbers = round_numbers(end)
    assert numbers[0] == 0 and 3 <= len(numbers) <= 6
    assert numbers[-1] <= end * (1 + 1e-9)


@given(st.floats(1e-3, 1e6), st.floats(1.2, 1e6))
def test_decade_numbers_are_on_the_axis(low, times):
    high = low * times
    assert all(low * (1 - 1e-9) <= number <= high * (1 + 1e-9) for number in decade_numbers(low, high))
    assert len(decade_numbers(low, high)) <= 10
