"""Runs on every rank of `memory_accuracy.py`: trains each case for a few steps with the byte meter on."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from memory_cases import Case, case_of
from metered_training import plan_of, train_metered
from shardwright.ds_configs.specs.hardware import parse_hardware
from shardwright.plugins.metering import ByteMeter, MeterReading


def main(cases_file: Path, output: Path) -> None:
    """Measure every case of a JSON file and append one line for each to `output` on rank 0."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from fresh_process import forget_last_run

    cases = [case_of(values) for values in json.loads(cases_file.read_text(encoding="utf-8"))]
    for case in cases:
        record: dict[str, Any] = {"case": asdict(case)}
        try:
            reading = measure(case)
            record |= asdict(reading) | {"peak_bytes": reading.peak_bytes}
        except Exception as error:
            # A class that cannot be trained so fails on all ranks alike; the other cases go on.
            record["failed"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        peaks: list[Any] = [None] * case.ranks
        torch.distributed.all_gather_object(peaks, record)
        if os.environ["RANK"] == "0":
            fullest = max(peaks, key=lambda found: found.get("peak_bytes", 0))
            with output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(fullest) + "\n")
            print("measured", case.name, fullest.get("failed", ""), flush=True)
        forget_last_run()


def measure(case: Case) -> MeterReading:
    """Train one case through the stock Trainer and return what lived on this rank."""
    plan = plan_of(case.strategy(), case.spec(), parse_hardware(f"{case.ranks}xCPU"), case.job())
    return train_metered(plan, case.config, ByteMeter())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
