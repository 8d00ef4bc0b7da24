"""Trains one case of `gpu_memory.py` on the first visible GPU and writes what it used."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_memory import GpuCase, predicted_fields
from metered_training import plan_of, train_metered
from shardwright.plugins.metering import AcceleratorMeter
from shardwright.plugins.planning.from_names import detect_hardware


def main(case: GpuCase, output: Path) -> None:
    """Write the prediction, train, and write the figures."""
    hardware = replace(detect_hardware(), gpus_per_node=1)
    plan = plan_of(case.strategy(), case.spec(), hardware, case.job())
    values = {"device": torch.cuda.get_device_name(), **predicted_fields(plan.chosen.memory.gpu)}
    output.write_text(json.dumps(values), encoding="utf-8")
    meter = AcceleratorMeter()
    outcome = "trained"
    try:
        train_metered(plan, case.config, meter)
    except RuntimeError as error:
        # Pinned host memory and cuBLAS report it as a plain RuntimeError.
        if "out of memory" not in str(error):
            raise
        outcome = "out of memory"
    output.write_text(json.dumps({"outcome": outcome, **values, **_figures(meter)}), encoding="utf-8")


def _figures(meter: AcceleratorMeter) -> dict[str, Any]:
    reading = meter.reading()
    free_bytes, device_bytes = torch.cuda.mem_get_info()
    return {
        "allocated_phases": reading.peaks,
        "reserved_peak_bytes": reading.reserved_peak_bytes,
        "context_bytes": device_bytes - free_bytes - torch.cuda.memory_reserved(),
    }


if __name__ == "__main__":
    main(GpuCase(**json.loads(sys.argv[1])), Path(sys.argv[2]))
