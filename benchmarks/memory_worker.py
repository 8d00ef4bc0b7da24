"""Runs on every rank of `memory_accuracy.py`: trains each case for a few steps with the byte meter on."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from memory_cases import Case
from memory_grid import run_cases
from metered_training import plan_of, train_metered
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.plugins.metering import ByteMeter


def measure(case: Case) -> dict[str, Any]:
    """Train one case through the stock Trainer and return what lived on this rank."""
    plan = plan_of(case.full_layout(), case.spec(), parse_hardware(f"{case.ranks}xCPU"), case.job())
    try:
        reading = train_metered(plan, case.config, ByteMeter())
    except Exception as error:
        # A class that cannot be trained so fails on all ranks alike; the other cases go on.
        return {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    return asdict(reading) | {"peak_bytes": reading.peak_bytes}


if __name__ == "__main__":
    run_cases(Case, measure)
