"""Measurements of runs that never happened, as tests need them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from planning import public_model
from shardwright.ds_configs.memory.estimate import MeasuredRun
from shardwright.ds_configs.plan.measurement import (
    FILE_NAME,
    RankMeasurement,
    RunMeasurement,
    measured_run,
    measurement_text,
    planned_run,
    predicted_memory,
)
from shardwright.ds_configs.plan.plan import Plan, make_plan
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.ds_configs.specs.job import TrainingJob

LLAMA_8B = public_model("meta-llama/Llama-3.1-8B")
GPU_RANK = RankMeasurement(
    rank=0,
    device="NVIDIA H100 80GB HBM3",
    peak_allocated_bytes=0,
    peak_reserved_bytes=0,
    later_peak_allocated_bytes=0,
    reserved_at_end_bytes=0,
    device_used_bytes=0,
    device_bytes=85_000_000_000,
    steps=20,
    first_step_seconds=(4.0, 1.5),
    median_step_seconds=1.25,
    mean_step_seconds=1.3,
)


@cache
def plan_on(hardware: str = "8xH100-80GB", **job: Any) -> Plan:
    """Llama-3.1-8B planned without measured runs."""
    return make_plan(LLAMA_8B, parse_hardware(hardware), TrainingJob(**job))


def measurement_of(plan: Plan, ratio: float = 1.02, **changes: Any) -> RunMeasurement:
    """A run whose fullest rank, the last, reserved `ratio` times the predicted tensor bytes."""
    reserved = round(plan.chosen.memory.gpu.allocated_bytes * ratio)
    ranks = []
    for rank in range(plan.hardware.world_size):
        mine = reserved - 1_000_000 * (plan.hardware.world_size - 1 - rank)
        ranks.append(
            replace(
                GPU_RANK,
                rank=rank,
                peak_allocated_bytes=mine - 2_000_000_000,
                later_peak_allocated_bytes=mine - 2_100_000_000,
                peak_reserved_bytes=mine,
                reserved_at_end_bytes=mine,
                device_used_bytes=mine + 1_100_000_000,
                median_step_seconds=1.25 + rank / 100,
            )
        )
    values: dict[str, Any] = {
        "plan": planned_run(plan),
        "predicted": predicted_memory(plan),
        "measured": tuple(ranks),
        "versions": {"torch": "2.13.0", "shardwright": metadata.version("shardwright")},
    }
    return RunMeasurement(**(values | changes))


def run_of(plan: Plan, ratio: float = 1.02) -> MeasuredRun:
    """What planning learns from such a run."""
    return measured_run(measurement_of(plan, ratio))


def write_measurement(measurement: RunMeasurement, directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / FILE_NAME).write_text(measurement_text(measurement), encoding="utf-8")
    return directory
