"""What a measured run counts: the most memory of any rank, the slowest rank, and what the allocator adds."""

from __future__ import annotations

from dataclasses import replace

from measuring import GPU_RANK, measurement_of, plan_on
from shardwright.ds_configs.plan.measurement import measured_run, measured_step, predicted_memory

GB = 10**9


def test_every_figure_is_that_of_the_rank_that_decides_it() -> None:
    allocated, reserved, seconds, used = (50, 70, 60), (80, 71, 75), (1.0, 3.0, 2.0), (84, 90, 99)
    ranks = tuple(
        replace(
            GPU_RANK,
            rank=rank,
            peak_allocated_bytes=allocated[rank] * GB,
            peak_reserved_bytes=reserved[rank] * GB,
            reserved_at_end_bytes=(reserved[rank] - 1) * GB,
            device_used_bytes=used[rank] * GB,
            median_step_seconds=seconds[rank],
        )
        for rank in range(3)
    )
    measurement = replace(measurement_of(plan_on()), measured=ranks, predicted_step_seconds=2.0)
    run, step = measured_run(measurement), measured_step(measurement)
    assert (run.allocated_peak_bytes, run.reserved_peak_bytes, run.step_seconds) == (70 * GB, 80 * GB, 3.0)
    # Of the rank that reserves the most: 84 in use on its device, 79 of them by its allocator.
    assert run.outside_allocator_bytes == 5 * GB
    assert step is not None and (step.measured_seconds, step.ratio, step.ranks) == (3.0, 1.5, 3)


def test_steps_that_generate_do_not_correct_later_plans() -> None:
    measurement = replace(measurement_of(plan_on()), predicted_step_seconds=2.0)
    of = {
        task: measured_step(
            replace(measurement, plan=replace(measurement.plan, job=measurement.plan.job | {"task": task}))
        )
        for task in ("sft", "dpo", "grpo")
    }
    assert [task for task, step in of.items() if step is not None] == ["sft", "dpo"]


def test_the_prediction_has_the_fragmentation_of_the_allocator() -> None:
    gpu = plan_on().chosen.memory.gpu
    predicted = predicted_memory(plan_on())
    fragmentation = gpu.terms["allocator_fragmentation"]
    assert predicted.reserved_bytes - predicted.allocated_bytes == fragmentation > 0
    outside = gpu.terms["runtime_context"] + gpu.terms.get("communicators", 0)
    assert predicted.peak_bytes == predicted.reserved_bytes + outside
